"""Workshops: agendas for two hours, a day or two days, which lead through the labs."""
