"""Floor 2: real processes from a cell. A zygote is kept warm, a warden looks after each cluster, ranks are forked."""
