"""Workshops: agendas of two hours, a day or two, which lead through the labs."""
