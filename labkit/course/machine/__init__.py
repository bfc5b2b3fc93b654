"""What this machine can do: the doctor's findings, and how many ranks a lab can use."""
