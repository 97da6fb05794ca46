"""All questions, in the order in which they are settled."""

import ask_bytes
import ask_filters
import ask_masks
import ask_pairs
import ask_personal
import ask_ranks
import ask_shrinkage
import ask_spread
from question import Question

_MODULES = (ask_bytes, ask_personal, ask_shrinkage, ask_masks, ask_pairs, ask_ranks, ask_filters, ask_spread)
QUESTIONS: dict[str, Question] = {module.QUESTION.name: module.QUESTION for module in _MODULES}
