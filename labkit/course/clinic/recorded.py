"""What the tests saw of every broken program, written by a run on two ranks of a shared machine with two cores.

It leaves out tests that the program does not live long enough for, autopsies in which no rank waits, and fingerprints
that are equal. `clinic.pieces` runs the tests again.
"""

from __future__ import annotations

from types import MappingProxyType

RECORDED: MappingProxyType[tuple[str, str], str] = MappingProxyType(
    {
        ("Ada", "autopsy"): "Hang: rank 0 waits in all_reduce #5 on world for rank 1, which has finished without it. "
        "ada.py:36: average(model, group)",
        ("Ada", "ledger"): "the last calls: rank 0 all_reduce #5 on world",
        ("Bea", "autopsy"): "Deadlock: rank 0 in all_gather #3 on tp waits for rank 1; rank 1 in all_reduce #3 on "
        "world waits for rank 0: everybody waits for somebody who waits. bea.py:47: share = "
        "float(experts.all_gather(rare).mean()) bea.py:51: average(model, group)",
        ("Bea", "ledger"): "the last calls: rank 0 all_gather #3 on tp; rank 1 all_reduce #3 on world",
        ("Cem", "autopsy"): "Deadlock: rank 0 in barrier #1 on tp waits for rank 1; rank 1 in all_reduce #4 on world "
        "waits for rank 0: everybody waits for somebody who waits. cem.py:42: save(model, savers) cem.py:38: "
        "average(model, group)",
        ("Cem", "ledger"): "the last calls: rank 0 barrier #1 on tp; rank 1 all_reduce #4 on world",
        ("Dora", "autopsy"): "Deadlock: rank 0 waits in send to rank 1; rank 1 waits in send to rank 0: everybody "
        "waits for somebody who waits. dora.py:30: group.send(part[-1:].clone(), right).wait()",
        ("Dora", "ledger"): "the last calls: rank 0 send to rank 1; rank 1 send to rank 0",
        ("Emil", "autopsy"): "rank 0 raised OutOfMemoryError: out of memory: tried to allocate 36,864 bytes of a "
        "device of 589,824; 159,744 are allocated, 430,080 reserved but unallocated, the largest free piece has "
        "32,768",
        ("Emil", "ledger"): "10 calls of rank 0, as many on every rank; it sends world 45.1 KiB",
        ("Emil", "clock"): "rank 0 outside verbs 17% (processor 14%), waits for the wire 72%, a rank 11%; rank 1 "
        "outside verbs 16% (processor 17%), waits for the wire 77%, a rank 7%",
        ("Emil", "memory"): "floor 96 KiB early, 125 KiB late; top 480 KiB, usually 291 KiB; at the top mostly other",
        ("Emil", "allocator"): "when it last grew 230 KiB of 704 KiB were allocated; largest free piece 32 KiB",
        ("Emil", "gradients"): "0.weight 0.074 long; 0.bias 0.01 long; 2.weight 0.11 long; 2.bias 0.014 long",
        ("Emil", "reference"): "first loss 0.705 (in one process 0.705), last 0.493 (in one process 0.493); first "
        "gradient 1 times as long",
        ("Fay", "autopsy"): "ranks 0 and 1 raised VirtualOutOfMemory: out of memory under a cap of 500,000 bytes: "
        "9,480 are free",
        ("Fay", "ledger"): "20 calls of rank 0, as many on every rank; it sends world 90.2 KiB",
        ("Fay", "clock"): "rank 0 outside verbs 20% (processor 29%), waits for the wire 64%, a rank 15%; rank 1 "
        "outside verbs 17% (processor 57%), waits for the wire 55%, a rank 28%",
        ("Fay", "memory"): "floor 149 KiB early, 394 KiB late; top 536 KiB, usually 373 KiB; at the top mostly "
        "activations",
        ("Fay", "allocator"): "when it last grew 497 KiB of 576 KiB were allocated; largest free piece 8,192 B",
        ("Fay", "gradients"): "0.weight 0.07 long; 0.bias 0.018 long; 2.weight 0.079 long; 2.bias 0.0017 long",
        ("Fay", "reference"): "first loss 0.635 (in one process 0.635), last 0.437 (in one process 0.437); first "
        "gradient 1 times as long",
        ("Gil", "autopsy"): "rank 0 raised VirtualOutOfMemory: out of memory under a cap of 700,000 bytes: 400,464 "
        "are free",
        ("Gil", "ledger"): "the last calls: rank 1 all_reduce #6 on world",
        ("Gil", "clock"): "rank 0 outside verbs 30% (processor 46%), waits for the wire 63%, a rank 7%; rank 1 "
        "outside verbs 24% (processor 37%), waits for the wire 32%, a rank 44%",
        ("Gil", "memory"): "floor 22.5 KiB early, 22.5 KiB late; top 1.79 MiB, usually 119 KiB; at the top mostly "
        "other",
        ("Gil", "allocator"): "when it last grew 1.79 MiB of 2.06 MiB were allocated; largest free piece 128 KiB",
        ("Gil", "gradients"): "0.weight 0.15 long; 0.bias 0.034 long; 2.weight 0.27 long; 2.bias 0.069 long",
        ("Gil", "reference"): "first loss 0.588 (in one process 0.588), last 0.475 (in one process 0.475); first "
        "gradient 1 times as long",
        ("Hana", "autopsy"): "ranks 0 and 1 raised VirtualOutOfMemory: out of memory under a cap of 8,388,608 bytes: "
        "0 are free",
        ("Hana", "ledger"): "14 calls of rank 0, as many on every rank; it sends world 16 MiB",
        ("Hana", "clock"): "rank 0 outside verbs 32% (processor 12%), waits for the wire 47%, a rank 20%; rank 1 "
        "outside verbs 28% (processor 16%), waits for the wire 62%, a rank 10%",
        ("Hana", "memory"): "floor 2 MiB early, 2.05 MiB late; top 10 MiB, usually 9.03 MiB; at the top mostly "
        "parameters",
        ("Hana", "allocator"): "when it last grew 16 MiB of 23.1 MiB were allocated; largest free piece 1 MiB",
        ("Hana", "reference"): "first loss 1.02 (in one process 1.02), last 1.02 (in one process 1.02)",
        ("Ivo", "ledger"): "1 calls of rank 0, as many on every rank; it sends world 4,096 B",
        ("Ivo", "clock"): "rank 0 outside verbs 42% (processor 3%), waits for the wire 0%, a rank 58%; rank 1 outside"
        " verbs 61% (processor 5%), waits for the wire 0%, a rank 39%",
        ("Ivo", "memory"): "floor 16.8 KiB early, 25.3 KiB late; top 50.9 KiB, usually 44.8 KiB; at the top mostly "
        "activations",
        ("Ivo", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Ivo", "reference"): "first loss 0.632 (in one process 0.632), last 0.632 (in one process 0.632)",
        ("June", "ledger"): "36 calls of rank 0, as many on every rank; it sends dp 640 KiB, tp 99 KiB; 87% of all "
        "bytes leave the node",
        ("June", "clock"): "rank 0 outside verbs 13% (processor 10%), waits for the wire 74%, a rank 13%; rank 1 "
        "outside verbs 24% (processor 15%), waits for the wire 71%, a rank 5%; rank 2 outside verbs 11% (processor "
        "9%), waits for the wire 77%, a rank 12%; rank 3 outside verbs 8% (processor 8%), waits for the wire 75%, a"
        " rank 17%",
        ("June", "memory"): "floor 514 KiB early, 291 KiB late; top 818 KiB, usually 650 KiB; at the top mostly "
        "activations",
        ("June", "allocator"): "when it last grew 820 KiB of 960 KiB were allocated; largest free piece 48 KiB",
        ("June", "reference"): "first loss 1.33 (in one process 1.33), last 1.33 (in one process 1.33)",
        ("Kim", "ledger"): "6 calls of rank 0, as many on every rank; it sends world 13.5 KiB",
        ("Kim", "clock"): "rank 0 outside verbs 49% (processor 15%), waits for the wire 50%, a rank 1%; rank 1 "
        "outside verbs 21% (processor 23%), waits for the wire 49%, a rank 30%",
        ("Kim", "memory"): "floor 4,520 B early, 4,520 B late; top 11.2 KiB, usually 11.2 KiB; at the top mostly other",
        ("Kim", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Kim", "gradients"): "0.weight nan long, 100% not finite; 0.bias nan long, 100% not finite; 2.weight nan "
        "long, 100% not finite; 2.bias nan long, 100% not finite",
        ("Kim", "reference"): "first loss 0.659 (in one process 0.659), last nan (in one process 0.334); first "
        "gradient nan times as long",
        ("Leo", "ledger"): "12 calls of rank 0, as many on every rank; it sends world 27 KiB",
        ("Leo", "clock"): "rank 0 outside verbs 57% (processor 28%), waits for the wire 41%, a rank 2%; rank 1 "
        "outside verbs 18% (processor 27%), waits for the wire 19%, a rank 62%",
        ("Leo", "memory"): "floor 4,520 B early, 4,520 B late; top 11.2 KiB, usually 11.2 KiB; at the top mostly other",
        ("Leo", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Leo", "gradients"): "0.weight 0 long, 100% zero; 0.bias 0 long, 100% zero; 2.weight 1.4e-07 long, 56% zero;"
        " 2.bias 3e-08 long",
        ("Leo", "reference"): "first loss 0.659 (in one process 0.659), last 0.33 (in one process 0.271); first "
        "gradient 3.89e-07 times as long",
        ("Mia", "ledger"): "12 calls of rank 0, as many on every rank; it sends world 54.1 KiB",
        ("Mia", "clock"): "rank 0 outside verbs 28% (processor 23%), waits for the wire 10%, a rank 61%; rank 1 "
        "outside verbs 73% (processor 29%), waits for the wire 27%, a rank 0%",
        ("Mia", "memory"): "floor 13 KiB early, 13 KiB late; top 26.5 KiB, usually 26.5 KiB; at the top mostly other",
        ("Mia", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Mia", "gradients"): "0.weight 4.7 long; 0.bias 1.1 long; 2.weight 7.9 long; 2.bias 2.1 long",
        ("Mia", "reference"): "first loss 0.72 (in one process 0.72), last 9.55e+31 (in one process 0.282); first "
        "gradient 8 times as long",
        ("Ned", "ledger"): "10 calls of rank 0, as many on every rank; it sends world 45.1 KiB",
        ("Ned", "clock"): "rank 0 outside verbs 30% (processor 20%), waits for the wire 27%, a rank 43%; rank 1 "
        "outside verbs 40% (processor 31%), waits for the wire 50%, a rank 11%",
        ("Ned", "memory"): "floor 8,976 B early, 13.3 KiB late; top 26.8 KiB, usually 22.3 KiB; at the top mostly "
        "other",
        ("Ned", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Ned", "gradients"): "0.weight 0.27 long; 0.bias 0.035 long; 2.weight 0.34 long; 2.bias 0.025 long",
        ("Ned", "fingerprints"): "weights of two ranks up to 0.48 apart",
        ("Ned", "reference"): "first loss 0.686 (in one process 0.659), last 0.274 (in one process 0.284); first "
        "gradient 0.85 times as long",
        ("Olga", "ledger"): "6 calls of rank 0, as many on every rank; it sends world 30 KiB",
        ("Olga", "clock"): "rank 0 outside verbs 43% (processor 19%), waits for the wire 56%, a rank 1%; rank 1 "
        "outside verbs 23% (processor 25%), waits for the wire 26%, a rank 51%",
        ("Olga", "memory"): "floor 7,824 B early, 7,824 B late; top 53.1 KiB, usually 53.1 KiB; at the top mostly "
        "activations",
        ("Olga", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Olga", "gradients"): "0.weight 0.35 long; 0.bias 4.3e-17 long, 6% zero; 1.weight 0.032 long; 1.bias 0.077 "
        "long; 3.weight 0.34 long; 3.bias 0.14 long",
        ("Olga", "fingerprints"): "weights of all ranks alike; buffers of two ranks up to 0.35 apart",
        ("Olga", "reference"): "first loss 0.49 (in one process 0.491), last 0.602 (in one process 0.63); first "
        "gradient 1 times as long",
        ("Paul", "ledger"): "8 calls of rank 0, as many on every rank; it sends world 2,064 B",
        ("Paul", "clock"): "rank 0 outside verbs 18% (processor 39%), waits for the wire 58%, a rank 24%; rank 1 "
        "outside verbs 23% (processor 35%), waits for the wire 67%, a rank 10%",
        ("Paul", "memory"): "floor 2,840 B early, 2,840 B late; top 7,188 B, usually 6,004 B; at the top mostly other",
        ("Paul", "allocator"): "when it last grew 1,024 B of 64 KiB were allocated; largest free piece 0 B",
        ("Paul", "gradients"): "weight 0.039 long; bias 0.16 long",
        ("Paul", "fingerprints"): "weights of two ranks up to 0.037 apart",
        ("Paul", "reference"): "first loss 0.44 (in one process 0.44), last 0.425 (in one process 0.419); first "
        "gradient 1 times as long",
        ("Rosa", "ledger"): "5 calls of rank 0, as many on every rank; it sends world 22.5 KiB",
        ("Rosa", "clock"): "rank 0 outside verbs 3% (processor 5%), waits for the wire 4%, a rank 93%; rank 1 outside"
        " verbs 93% (processor 46%), waits for the wire 7%, a rank 0%",
        ("Rosa", "memory"): "floor 8,912 B early, 6,800 B late; top 20.2 KiB, usually 20.2 KiB; at the top mostly "
        "other",
        ("Rosa", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Rosa", "gradients"): "0.weight 0.36 long; 0.bias 0.056 long; 2.weight 0.49 long; 2.bias 0.096 long",
        ("Rosa", "reference"): "first loss 0.792 (in one process 0.792), last 0.296 (in one process 0.296); first "
        "gradient 1 times as long",
        ("Sam", "ledger"): "6 calls of rank 0, as many on every rank; it sends world 27 KiB",
        ("Sam", "clock"): "rank 0 outside verbs 97% (processor 6%), waits for the wire 2%, a rank 1%; rank 1 outside "
        "verbs 97% (processor 5%), waits for the wire 2%, a rank 2%",
        ("Sam", "memory"): "floor 6,800 B early, 6,800 B late; top 20.2 KiB, usually 20.2 KiB; at the top mostly other",
        ("Sam", "allocator"): "when it last grew 2,048 B of 64 KiB were allocated; largest free piece 0 B",
        ("Sam", "gradients"): "0.weight 0.32 long; 0.bias 0.045 long; 2.weight 0.42 long; 2.bias 0.07 long",
        ("Sam", "reference"): "first loss 0.792 (in one process 0.792), last 0.261 (in one process 0.261); first "
        "gradient 1 times as long",
        ("Tess", "ledger"): "60 calls of rank 0, as many on every rank; it sends world 22.5 KiB",
        ("Tess", "clock"): "rank 0 outside verbs 30% (processor 46%), waits for the wire 53%, a rank 17%; rank 1 "
        "outside verbs 31% (processor 41%), waits for the wire 61%, a rank 8%",
        ("Tess", "memory"): "floor 40.8 KiB early, 40.8 KiB late; top 98.6 KiB, usually 90.1 KiB; at the top mostly "
        "activations",
        ("Tess", "allocator"): "when it last grew 68.5 KiB of 128 KiB were allocated; largest free piece 25 KiB",
        ("Tess", "gradients"): "up.A 0.33 long; up.B 0.34 long; up.linear.weight no gradient; up.linear.bias no "
        "gradient; down.weight no gradient; down.bias no gradient",
        ("Tess", "reference"): "first loss 3.76 (in one process 3.76), last 2.88 (in one process 1.32e-30)",
    }
)
"""(name, test) -> what it saw."""
