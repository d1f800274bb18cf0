"""The openai client for Python against mneme serve: completions, streams, conversations, tools.

usage: openai_client.py MNEME MAKE_MODEL [MODEL]          pip install openai

Without MODEL: random weights, and a chat template that knows tools.
"""
import sys
import tempfile

import openai

from serving import Server, chat_model, table

mneme, make_model = sys.argv[1:3]
CONFIG = {"layers": "gdn, kla", "num_hidden_layers": 2, "hidden_size": 64}
folder = tempfile.TemporaryDirectory()
model = sys.argv[3] if len(sys.argv) > 3 else chat_model(make_model, folder.name + "/model", CONFIG)
server = Server(mneme, model, env={"MNEME_API_KEY": "secret"})
client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
rows = []


def row(what, holds, more=""):
    rows.append((what, "holds" if holds else "FAILS", more))


name = client.models.list().data[0].id
ask = dict(model=name, prompt="Once upon a time", max_tokens=24, seed=3)
whole = client.completions.create(**ask, logprobs=2)
text = whole.choices[0].text
row("completions", len(text) > 0 and whole.usage.completion_tokens > 0, whole.usage.total_tokens)
row("logprobs", len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens)
parts = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
row("streamed completions", "".join(p.choices[0].text for p in parts if p.choices) == text)
row("usage at the end of a stream", parts[-1].usage.completion_tokens == whole.usage.completion_tokens)
echo = client.completions.create(**{**ask, "max_tokens": 0}, echo=True)
row("echo, max_tokens 0", echo.choices[0].text == ask["prompt"])
both = client.completions.create(**{**ask, "prompt": ["a", "b"], "n": 2})
row("two prompts, n 2", [c.index for c in both.choices] == [0, 1, 2, 3])
row("beyond OpenAI's fields", client.completions.create(**ask, extra_body={"top_k": 1}).choices[0].text)

messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
chat = client.chat.completions.create(model=name, messages=messages, max_tokens=16, seed=1)
row("chat", chat.choices[0].message.role == "assistant", chat.usage.prompt_tokens)
told = "".join(p.choices[0].delta.content or "" for p in client.chat.completions.create(
    model=name, messages=messages, max_tokens=16, seed=1, stream=True) if p.choices)
row("streamed chat", told == (chat.choices[0].message.content or ""))
logs = client.chat.completions.create(model=name, messages=messages, max_tokens=4, logprobs=True,
                                      top_logprobs=3)
row("chat logprobs", len(logs.choices[0].logprobs.content[0].top_logprobs) == 3)
tools = [{"type": "function", "function": {"name": "weather", "description": "of a city",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
with_tools = client.chat.completions.create(model=name, messages=messages, tools=tools, max_tokens=8,
                                            tool_choice="auto")
row("tools of the template", with_tools.usage.prompt_tokens >= chat.usage.prompt_tokens,
    with_tools.usage.prompt_tokens)
answered = messages + [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"}]
row("an answer of a tool", client.chat.completions.create(model=name, messages=answered, tools=tools,
                                                          max_tokens=4).choices[0].finish_reason)
for what, kind, call in (
        ("a wrong key", openai.AuthenticationError,
         lambda: client.with_options(api_key="other").models.list()),
        ("a temperature below 0", openai.BadRequestError,
         lambda: client.completions.create(**{**ask, "temperature": -1})),
        ("a path that is not there", openai.NotFoundError,
         lambda: client.embeddings.create(model=name, input="x"))):
    try:
        call()
        row(what, False)
    except kind as e:
        row(what + ": " + kind.__name__, bool(e.body and e.body.get("message")), e.status_code)
row("exit status", server.stop() == 0)
table(rows)
raise SystemExit(any(r[1] == "FAILS" for r in rows))
