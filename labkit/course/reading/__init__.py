"""Aids for reading: the library's own source, the sheet of verbs, the glossary."""
