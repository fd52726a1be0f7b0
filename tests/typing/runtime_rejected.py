"""What the type checker must reject: each line that it lets pass is an unused ignore, an error."""

from dataclasses import dataclass

from turnkeeper.runtime import Actor, MailboxSettings, Message, Ref, Runtime, Supervision


@dataclass(frozen=True, slots=True)
class Get(Message[int]):
    pass


@dataclass(frozen=True, slots=True)
class Other(Message[str]):
    pass


class Counter(Actor[Get]):
    def receive(self, message: Get) -> int:
        del message
        return 1


class Wrong(Actor[Get]):
    def receive(self, message: Other) -> int:  # type: ignore[override]
        del message
        return 1


async def misuse(runtime: Runtime) -> None:
    counter = runtime.spawn(Counter, name="counter")
    text: str = await counter.ask(Get())  # type: ignore[arg-type]
    await counter.ask("not a message")  # type: ignore[arg-type]
    await counter.tell(Other())  # type: ignore[arg-type]
    counter.tell_nowait(text)  # type: ignore[arg-type]
    counter.tell(Get())  # type: ignore[unused-coroutine]
    wide: Ref[Get | Other] = counter  # type: ignore[assignment]
    wide.watch(counter)  # type: ignore[arg-type]
    runtime.spawn(Counter)  # type: ignore[call-arg]
    runtime.spawn(Counter(), name="an instance")  # type: ignore[arg-type]
    runtime.region("no key", Counter)  # type: ignore[arg-type]
    MailboxSettings(overflow="drop_newest")  # type: ignore[arg-type]
    Supervision(strategy="one_for_some")  # type: ignore[arg-type]
