"""The capstone: its task, attempts on real ranks, the referee that measures them, and the picture of the results."""
