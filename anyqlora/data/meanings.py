"""Keys of a row that say more than its format reads: what they mean, and what is done with them.

A key is read by the row's format, or known to be harmless (HARMLESS), or means something that nobody here can honour:
then the row is refused, with that meaning. What is none of these is named before training (audit.warnings).
"""

from __future__ import annotations

from anyqlora.data.readers.bad_rows import BadRow, shown

HARMLESS = frozenset(
    {
        *("id", "ids", "_id", "uid", "uuid", "guid", "idx", "index", "row_id", "row_index", "item_id", "sample_id"),
        *("example_id", "conversation_id", "conv_id", "dialog_id", "session_id", "thread_id", "post_id"),
        *("question_id", "answer_id", "prompt_id", "problem_id", "doc_id", "document_id", "hash", "sha", "sha256"),
        *("md5", "fingerprint", "key", "name", "names", "title", "headline", "subject", "author", "authors"),
        *("user", "users", "username", "user_id", "annotator", "annotator_id", "worker_id", "source", "sources"),
        *("src", "data_source", "dataset", "dataset_name", "dataset_id", "origin", "provenance", "collection"),
        *("subset", "split", "partition", "url", "urls", "link", "links", "uri", "path", "file", "filename"),
        *("file_name", "file_path", "repo", "repo_name", "date", "time", "timestamp", "ts", "year", "created"),
        *("created_at", "created_date", "creation_date", "modified", "updated", "updated_at", "date_created"),
        *("license", "licence", "copyright", "language", "lang", "langs", "language_code", "locale", "country"),
        *("model", "models", "model_name", "model_id", "generator", "generated_by", "teacher", "provider"),
        *("engine", "tokenizer", "version", "revision", "category", "categories", "topic", "topics", "tag", "tags"),
        *("keywords", "genre", "domain", "field", "task", "tasks", "task_type", "task_name", "task_id", "type"),
        *("kind", "skill", "skills", "ability", "subtopic", "sub_topic", "theme", "difficulty", "level", "grade"),
        *("metadata", "meta", "extra", "extra_info", "additional_info", "info", "notes", "note", "comment"),
        *("comments", "description", "length", "len", "char_count", "num_chars", "word_count", "num_words"),
        *("token_count", "token_counts", "num_tokens", "n_tokens", "tokens_count", "num_turns", "turns", "n_turns"),
        *("views", "likes", "upvotes", "downvotes", "votes", "num_votes", "downloads", "avatarurl"),
        *("__index_level_0__", "unnamed: 0"),
    }
)
IMAGES = "the row shows pictures or plays sound, which nothing here can be trained on"
WEIGHED = "how much of the row is to be learned"
TREE = "a message of a tree of messages, one to a row"
TOKENS = "the row is tokens already"
TEMPLATE = "how the chat template is to write the row"
PREFERENCE = "an answer that was preferred to another"
DESIRABLE = "whether the answer is a good one"
TOOLS = "the tools that the model may call"
CONTEXT = "what the model is told before the question"
# A key -> what it means. Whatever else a row may have under these names is not for training on without a word.
MEANINGS = {
    **dict.fromkeys(("chosen", "rejected"), PREFERENCE),
    **dict.fromkeys(("label", "kto_tag", "desirable"), DESIRABLE),
    **dict.fromkeys(
        ("score", "rating", "reward", "quality", "score_chosen", "score_rejected", "chosen_score", "rejected_score"),
        "how good an answer is",
    ),
    **dict.fromkeys(
        (
            *("image", "images", "image_path", "image_paths", "image_url", "video", "videos", "audio", "audios"),
            *("pixel_values", "media", "objects"),
        ),
        IMAGES,
    ),
    **dict.fromkeys(
        ("weight", "weights", "loss_weight", "loss_scale", "sample_weight", "loss_mask", "train", "training", "loss"),
        WEIGHED,
    ),
    **dict.fromkeys(("parent_id", "message_tree_id", "message_id", "role"), TREE),
    **dict.fromkeys(("input_ids", "labels", "attention_mask", "token_ids", "segments"), TOKENS),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "reasoning_effort", "chat_template"), TEMPLATE),
    **dict.fromkeys(("system", "system_prompt", "system_message", "history", "persona", "character"), CONTEXT),
    **dict.fromkeys(("tools", "functions", "available_tools"), TOOLS),
}
CURES = {
    PREFERENCE: "--preference_data chosen, which trains the preferred answers as any others (there is no DPO here)",
    DESIRABLE: "--preference_data chosen, which trains the good ones and leaves the others out (there is no KTO here)",
    CONTEXT: "--prompt_format chat where the tokenizer has a chat template",
    TOOLS: "rows of messages, with 'tools' beside them",
    TREE: "conversations, one to a row: messages from the root to a leaf",
    WEIGHED: "'train' or 'weight', 0 or 1, in each message",
    TOKENS: "rows of text",
}


def ignoring(row: dict, names: frozenset[str]) -> dict:
    """The row without these keys, and without them in its messages, but for what a message is made of."""
    if not names:
        return row
    of_messages = names - {"role", "content", "from", "value"}

    def rest(value: object) -> object:
        if isinstance(value, list):
            return [rest(item) for item in value]
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if key not in of_messages}
        return value

    turns = ("messages", "conversations", "prompt", "completion")
    return {key: rest(value) if key in turns else value for key, value in row.items() if key not in names}


def is_empty(value: object) -> bool:
    return value is None or value == "" or value == [] or value == {}


def check(row: dict, used: tuple[str, ...]) -> None:
    """Raises BadRow for a key that the row's format does not read, and that means something."""
    for key, value in row.items():
        meaning = MEANINGS.get(key.lower())
        if key in used or meaning is None or is_empty(value):
            continue
        if meaning is DESIRABLE and value not in (True, False, 0, 1):
            meaning = "a class, which the row's text does not say"
        raise BadRow(
            f"{key!r} says something that would not be learned: {meaning}",
            f"{CURES.get(meaning, 'rows without it')}; or --ignore_columns {key}",
        )


# ------------------------------------------------------------------------------------------------------- preferences


def _with_usual_names(row: dict) -> dict:
    """A preference row as OpenAI writes it (input, preferred_output, non_preferred_output) under the usual names; and
    of SHP and others (response_chosen, chosen_response).
    """
    if "preferred_output" in row and isinstance(row.get("input"), dict):
        rest = {key: value for key, value in row.items() if key not in _OPENAIS}
        asked = {key: value for key, value in row["input"].items() if key not in ("messages", "parallel_tool_calls")}
        return {
            **rest,
            **asked,
            "prompt": row["input"].get("messages"),
            "chosen": row["preferred_output"],
            "rejected": row.get("non_preferred_output"),
        }
    named = {theirs: ours for theirs, ours in _OTHER_NAMES.items() if theirs in row and ours not in row}
    return {named.get(key, key): value for key, value in row.items()} if named else row


_OPENAIS = ("input", "preferred_output", "non_preferred_output")
_OTHER_NAMES = {
    **dict.fromkeys(("chosen_response", "response_chosen", "answer_chosen"), "chosen"),
    **dict.fromkeys(("rejected_response", "response_rejected", "answer_rejected"), "rejected"),
}


def refuse_preferences(row: dict) -> dict:
    """The row itself. Raises BadRow for one that names a better and a worse answer, of which no format knows."""
    row = _with_usual_names(row)
    if "chosen" in row and "rejected" in row:
        raise BadRow("a row of a preference set, with a chosen and a rejected answer", CURES[PREFERENCE])
    return row


class NotChosen(Exception):
    """A row of a preference set that is not for learning."""


def chosen(row: dict) -> dict:
    """The row of a preference set as one with its preferred answer; any other row as it is.

    Read: chosen and rejected as text (with prompt, instruction or question), as lists of messages, with or without what
    stands before them, and as one turn behind "conversations" (LLaMA-Factory); label, kto_tag and desirable as true and
    false. Raises BadRow for what is none of these, NotChosen for a row that is labelled false.
    """
    row = _with_usual_names(row)
    for key in ("label", "kto_tag", "desirable"):
        if row.get(key) in (True, False, 0, 1) and row.get(key) is not None and "chosen" not in row:
            if not row[key]:
                raise NotChosen
            return {name: value for name, value in row.items() if name != key}
    if is_empty(row.get("chosen")):
        return row
    rest = {
        key: value
        for key, value in row.items()
        if key not in ("chosen", "rejected", "score_chosen", "score_rejected", "chosen_score", "rejected_score")
    }
    answer = row["chosen"]
    if isinstance(answer, str):
        return _chosen_text(rest, answer)
    if isinstance(answer, dict):
        return _chosen_turn(rest, answer)
    if isinstance(answer, list):
        return _chosen_turns(rest, answer, row.get("rejected"))
    raise BadRow(f"'chosen' is {shown(answer)}", "text, a message, or a list of messages")


def _chosen_text(rest: dict, answer: str) -> dict:
    for question, key in (("instruction", "output"), ("prompt", "completion"), ("question", "answer")):
        if question in rest:
            return {**rest, key: answer}
    raise BadRow("'chosen' is text, and nothing says what was asked", "'prompt', 'instruction' or 'question' beside it")


def _chosen_turns(rest: dict, answer: list, rejected: object) -> dict:
    """Only the answer is learned: what both lists begin with was there before."""
    prompt = rest.pop("prompt", None)
    if isinstance(prompt, list) and answer[: len(prompt)] != prompt:
        return {**rest, "prompt": prompt, "completion": answer}
    if isinstance(prompt, str) and answer and isinstance(answer[0], dict) and answer[0].get("role") == "assistant":
        return {**rest, "prompt": [{"role": "user", "content": prompt}], "completion": answer}
    pairs = zip(answer, rejected, strict=False) if isinstance(rejected, list) else ()
    alike = next((number for number, (one, other) in enumerate(pairs) if one != other), len(answer) - 1)
    return {**rest, "prompt": answer[:alike], "completion": answer[alike:]}


def _chosen_turn(rest: dict, answer: dict) -> dict:
    for key in ("conversations", "messages"):
        if isinstance(rest.get(key), list):
            turns = [{**turn, "train": False} if isinstance(turn, dict) else turn for turn in rest[key]]
            return {**rest, key: [*turns, answer]}
    raise BadRow("'chosen' is a message, and nothing says what was asked", "'conversations' or 'messages' beside it")
