#!/bin/sh
# Ranks for a notebook, with torchrun. In the notebook:
#
#     cluster = Cluster.join(8, nodes=2)        # writes the file of keys and prints the line below
#
# Run this on each node. FILE is the file of keys (mode 0600), on a shared file system or copied with scp -p.
# The first node's name must be reachable from the others (port 29400: torchrun's own rendezvous).
# When the notebook says cluster.close(), torchrun returns 0.

FILE=${1:?the file that Cluster.join has written}
FIRST_NODE=${2:?name or address of the first node}
NODES=${3:-2}
RANKS_PER_NODE=${4:-4}

exec torchrun --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST_NODE:29400" --rdzv-id "$(basename "$FILE" .json)" \
    -m labkit.launch.worker --join "$FILE"
