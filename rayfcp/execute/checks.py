"""What attention is called with must agree with its program."""

from torch import Tensor

from rayfcp.execute.schedule import ReadyHeads, ReadyProgram


def check_tokens(query: Tensor, key: Tensor, *, program: ReadyProgram | ReadyHeads, rank: int) -> None:
    """As many tokens as the program loads, or the loop brings."""
    around = program.reshuffle
    if around and around.program.rank != rank:
        raise ValueError(
            f"attention: the reshuffle is of rank {around.program.rank}, this is rank {rank}; pass "
            "the one lowered for this rank"
        )
    due = around.program.num_tokens if around else program.num_tokens
    found = (query.shape[0], key.shape[0])
    if found != (due, due) and not (around and due == 0 and found == (1, 1)):
        owner, remedy = ("reshuffle", "brings") if around else ("program", "loads")
        raise ValueError(
            f"attention: query has {found[0]} tokens and key {found[1]}, the {owner} has {due}; "
            f"pass the tokens that the {owner} {remedy}, in its order"
        )


def check_shapes(query: Tensor, key: Tensor, *, value: Tensor) -> None:
    """Shapes and dtypes that agree."""
    if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; want "
            "equal key and value, one head_dim, and heads a multiple of kv_heads"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"attention: query is {query.dtype}, key {key.dtype}, value {value.dtype}, must be one dtype; cast them"
        )
