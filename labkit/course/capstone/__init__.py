"""The capstone: its task, attempts on real ranks, the referee who measures them, the plane that shows them."""
