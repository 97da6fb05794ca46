"""All questions, in the order in which they are settled."""

import ask_adapters
import ask_bytes
import ask_filters
import ask_masks
import ask_pairs
import ask_personal
import ask_ranks
import ask_shrinkage
import ask_spread
from question import Question

_QUESTIONS = (
    ask_bytes.QUESTION,
    ask_personal.QUESTION,
    ask_shrinkage.QUESTION,
    ask_masks.QUESTION,
    ask_pairs.QUESTION,
    ask_ranks.QUESTION,
    ask_filters.QUESTION,
    ask_spread.QUESTION,
    ask_adapters.QUESTION,
    ask_adapters.VISION_QUESTION,
    ask_adapters.DIGITS_QUESTION,
)
QUESTIONS: dict[str, Question] = {question.name: question for question in _QUESTIONS}
