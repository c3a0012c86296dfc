"""The prompt that the demo generates from: long enough that most of its cache is coded. Knows no model."""

PROMPT = """\
The lighthouse on Gull Rock was built in 1874, after three ships had been lost in one winter. Its keeper for thirty \
years was Marta Lindqvist, who had come to the island as a schoolteacher and stayed when the school closed. Every \
evening at dusk she climbed the one hundred and twelve steps to the lamp room, trimmed the wick, wound the clockwork \
that turned the lens, and wrote the weather into a blue notebook. She wrote about other things too: the seals that \
slept below the boathouse, the price of lamp oil, the letters from her sister in Bergen.

In the autumn of 1911 a storm broke the large window of the lamp room, and rain put out the flame. Marta knew that \
the mail boat was due before midnight. She could not light the lamp again in that wind, so she carried her kitchen \
stove, piece by piece, up all the steps, set it behind the iron shutter, and burned her own chairs in it until \
morning. The captain of the mail boat later said that he had seen a red light where he expected a white one, and had \
taken it for a warning. He turned away from the rock in time, with forty people on board.

The harbour office sent her a medal and a bill for the window. She hung the medal on the boathouse door, where the \
salt soon turned it green, and she never paid the bill. Her notebooks are kept today in the town library. The page \
for that night has only one line on it, in pencil: "Wind south-west, very strong. Must ask for new chairs."

Question: What did Marta do on the night of the storm?
Answer briefly."""


def prompt_of_length(characters: int) -> str:
    """The prompt, or as much of its end as fits: a model that takes little text still sees the question."""
    return PROMPT[-characters:] if characters < len(PROMPT) else PROMPT
