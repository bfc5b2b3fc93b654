"""What helps to read: the library's own source, the sheet of verbs, the glossary."""
