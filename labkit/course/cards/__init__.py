"""Cards: questions of interviews and their answers, whose numbers are computed and never typed."""
