"""A round under secure aggregation: what of it is summed, in which integers, who must be there, and what it costs.

The sum itself is `sparing.secure`, which knows vectors of integers only. Here a client's weighed update becomes such a
vector, on the grid of the exact fold, and the sum of vectors becomes the fold that `core.round.settle` takes. So with
the same clients counted, a model has the same bits with and without masks.

settings      what a study says of it
summable      which methods add up, and what to use in place of those that do not
fixed_point   a few numbers of each client, added without rounding
sum_layout    what stands where in the vector
summands      a client's vector, and what the server makes of the sum
planned_sum   who is in the sum of a round, and the bytes of every message, before any is sent
sum_notice    what clients are told with their download
told_alike    what all of them must have been told alike
one_process   all parties of a sum in one process, for simulations
"""
