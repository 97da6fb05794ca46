"""Several processes that play one run together, on one machine or many: torch.distributed, under torchrun or Slurm.

Every rank holds the whole server. Clients are shared out, the sums of the exact fold are added over all ranks, and
every rank settles the round by itself: the fold is exact, so all come to the same bits, however many they are.

rank_place     which rank this process is, from its environment
meeting        where ranks meet first, and learn that one of them is gone
group          the ranks of a run, and what passes between them
agreement      what all of them must have in common
rank_sums      folds and votes added over all ranks; updates of blends that need everyone brought to the first
shards         whose clients are whose, and rows of clients that lie with their rank
"""
