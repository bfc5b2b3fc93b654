"""The problems, one a file, named pLL_N_name.py: lab, place in the lab, what is written."""
