"""What all endpoints share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from common.async_connection import AsyncConnection
from common.config import HttpConfig
from common.messages import Info
from common.sampling_params import SamplingParams
from common.story import Story, shown
from gateway_proc.auth import namespace
from gateway_proc.backend import Backend
from gateway_proc.conversation import Conversation, conversation_of, template_arguments
from gateway_proc.errors import refused, told_by_cluster
from gateway_proc.generation import Generation, Job, Prompt
from gateway_proc.http import story_of, while_connected
from gateway_proc.params import Defaults, sampling_params
from gateway_proc.prompt_ends import PromptEnds
from gateway_proc.requests import BodyReader, check_model
from gateway_proc.schemas.chat import ChatRequest
from gateway_proc.schemas.sampling import SamplingFields


@dataclass(slots=True)
class Service:
    """The cluster, the way bodies are read, the defaults of sampling, and what is known of the chat template."""

    backend: Backend
    reader: BodyReader
    http: HttpConfig
    defaults: Defaults = field(default_factory=Defaults)
    prompt_ends: PromptEnds = field(default_factory=PromptEnds)
    load: int = 0  # requests that generate, and have not ended

    def begin(self, request: Request, fields: SamplingFields) -> tuple[AsyncConnection, Info, Story]:
        """A request that generates: the cluster must be there and serve the model. Raises ApiError."""
        connection, info = self.backend.use()
        story = story_of(request)
        self.load += not story.generates
        story.generates = True
        story.id = fields.request_id or story.id
        story.stream = bool(fields.stream)
        story.user = shown(fields.user) if fields.user else "-"
        check_model(fields.model, info)
        story.model = shown(fields.model or info.names[0])
        if fields.stream_options is not None and not fields.stream:
            raise refused("stream_options", "is only allowed with stream")
        if fields.use_beam_search and fields.stream:
            raise refused("stream", "cannot be used with use_beam_search: its answers come at the end")
        return connection, info, story

    def generation(
        self,
        connection: AsyncConnection,
        story: Story,
        fields: SamplingFields,
        prompts: list[Prompt],
        params: Any,
        *,
        n: int,
        stream: bool,
        names: Mapping[str, str],
        prompt_only: bool = False,
        **options: Any,
    ) -> Generation:
        """The requests to the cluster, not yet sent."""
        options |= fields.truncation() | {
            "cache_salt": namespace(story.key, fields.cache_salt),
            "priority": fields.priority or 0,
            "deadline_ms": fields.deadline_ms or 0,
        }
        return Generation(connection, Job(prompts, params, n, stream, options, names, prompt_only), story)

    async def conversation(
        self, connection: AsyncConnection, info: Info, chat: ChatRequest, effort_field: str = "reasoning_effort"
    ) -> Conversation:
        """A chat as the cluster takes it. Raises ApiError, with the client's name for the effort."""
        arguments = template_arguments(chat, info, effort_field)
        prompt_end = await self.prompt_ends.of(connection, info, arguments)
        return conversation_of(chat, info, arguments, prompt_end)

    def chat_params(
        self,
        chat: ChatRequest,
        conversation: Conversation,
        max_tokens: int | None,
        names: Mapping[str, str],
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """How the tokens of a chat are drawn. Raises ApiError."""
        return sampling_params(
            chat,
            self.defaults,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=conversation.grammar,
            skip_special_tokens=False if conversation.needs_special_tokens else None,
            names=names,
        )

    @staticmethod
    async def prompt_ids(
        request: Request,
        connection: AsyncConnection,
        conversation: Conversation,
        names: Mapping[str, str],
        truncation: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The tokens that the cluster makes of a chat. Raises ApiError, and ClientGone."""
        options = {**conversation.template, **truncation}
        with told_by_cluster(names):
            asked = connection.tokenize(conversation.messages, add_special_tokens=False, **options)
            return list((await while_connected(request.receive, asked)).token_ids)

    def answers(
        self,
        connection: AsyncConnection,
        story: Story,
        chat: ChatRequest,
        conversation: Conversation,
        params: Any,
        names: Mapping[str, str],
    ) -> Generation:
        """The request of a chat to the cluster, not yet sent."""
        tells = conversation.tells_reasoning
        generation = self.generation(
            connection, story, chat, [conversation.messages], params, n=chat.n or 1,
            # which tokens are reasoning shows only where they come one by one
            stream=bool(chat.stream) or (tells and not chat.use_beam_search),
            names=names, **conversation.template,
        )  # fmt: skip
        if tells:
            generation.usage.reasoning_tokens = 0
        return generation
