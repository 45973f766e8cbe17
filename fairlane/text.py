"""What the command prints for people."""

from common.settings import Settings

CURL = """curl -N http://{address}/v1/chat/completions{auth} \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "stream": true,
       "messages": [{{"role": "user", "content": "Hello"}}]}}'"""

SNIPPET = """from openai import OpenAI
client = OpenAI(base_url="http://{address}/v1", api_key="{key}")
for chunk in client.chat.completions.create(
    model="{model}", stream=True, messages=[{{"role": "user", "content": "Hello"}}]
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)

print()"""


def welcome(settings: Settings, port: int, model: str, *, simulated: bool) -> str:
    """The lines after `fairlane up`: where it is, what to try, what is not real."""
    host = settings.gateway.host
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    address = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
    auth = " -H 'Authorization: Bearer YOUR-KEY'" if settings.keys else ""
    key = "YOUR-KEY" if settings.keys else "none"
    lines = [f"Fairlane is up: http://{address}/v1", "", "Try:", ""]
    lines.append(CURL.format(address=address, auth=auth, model=model))
    lines += ["", "or, with `pip install openai`:", ""]
    lines.append(SNIPPET.format(address=address, key=key, model=model))
    lines.append("")
    if simulated:
        lines.append(
            "Simulated: two engines of 8 slots that answer with generated words as the model "
            "`sim`. Real ones: fairlane up --backend http://GPU-HOST:8000"
        )
    if settings.redis.url is None:
        lines.append(
            "Embedded: the broker is inside this process; jobs and batches end with it, "
            "files stay in the store. "
            "A real one: --redis redis://HOST:6379/0"
        )
    lines.append("Stop with Ctrl-C.")
    return "\n".join(lines)


def checked(settings: Settings, found: list[tuple[str, bool, str]]) -> str:
    """The lines of `fairlane check`."""
    backends = {b.address for b in settings.backends}
    backends |= {b.address for model in settings.models.values() for b in model.backends}
    counts = {"key": len(settings.keys), "model": len(settings.models), "backend": len(backends)}
    told = [f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items()]
    lines = [f"configuration: {', '.join(told)}"]
    lines += [f"{'ok  ' if ok else 'FAIL'} {what}: {text}" for what, ok, text in found]
    return "\n".join(lines)
