"""Several processes that play one run together, on one machine or many: torch.distributed, under torchrun or Slurm.

Every rank holds the whole server. Clients are shared out, the sums of the exact fold are added over all ranks, and
every rank settles the round by itself: the fold is exact, so all come to the same bits, however many they are.

rank_place     which rank this process is, from its environment
group          the ranks of a run, and what passes between them
rank_sums      folds and votes added over all ranks; updates of blends that need everyone brought to the first
shards         whose clients are whose, and rows of clients that lie with their rank
"""
