"""Trees of messages, one to a row, as OpenAssistant publishes them: a prompt, and replies to replies."""

from __future__ import annotations

_ABOUT = ("message_tree_id", "tree_state", "origin")


def is_tree(row: dict) -> bool:
    """Whether a row's prompt has replies below it."""
    prompt = row.get("prompt")
    return isinstance(prompt, dict) and "text" in prompt and isinstance(prompt.get("replies"), list)


def best_path(row: dict) -> dict:
    """The row as a conversation: from the prompt down, of the replies to each message the one with the best rank (0),
    or where none is ranked the first.
    """
    messages, node = [], row["prompt"]
    while node is not None:
        messages.append({"role": node.get("role"), "content": node.get("text")})
        replies = [reply for reply in node.get("replies") or () if isinstance(reply, dict) and not reply.get("deleted")]
        node = min(replies, key=_rank, default=None)
    return {**{key: value for key, value in row.items() if key not in (*_ABOUT, "prompt")}, "messages": messages}


def _rank(reply: dict) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, (int, float)) else float("inf")
