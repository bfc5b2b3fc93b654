"""Cards: interview questions and their answers, in which every number is computed and none is typed."""
