"""One file a mechanism: what it excludes, holds, sends and waits for."""
