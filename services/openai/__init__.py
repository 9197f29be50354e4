"""The HTTP port: OpenAI's API, Anthropic's messages and vLLM's tokenization. Bodies become requests of the library; its
answers and errors become responses and events.

Below is the path of a call that generates, in the order in which the code is best read. The dialect of an endpoint
(in `completions`, `responses`, `anthropic`) knows its bodies and events; everything else is common.

  call    `server`: `OpenAiServer._generate`: `_read` reads the body, `_within` limits the time and registers the
          call, `_answer` does what follows
  read    within `_read`: `ResponsesDialect.read` (`responses`), for example: `BodyForm.read` (`requests`) checks the
          body by the forms of `bodies` and calls `_request`, which ends in `chat_request` (`requests`); completions
          and chats end in `understood` there -> `ApiCall` (`dialects`): a call of HTTP, not of a tool. Its
          `CompletionRequest` has prompts and settings as given, in any API, and makes a `Request` of the library for
          each answer. `bodies` and `requests` need not be opened
  submit  `server`: `_requests_of`, then `_decode`, which loops over `RequestHandler.updates`
          (`services.gateway.request_handler`). An update is an `Output`: new tokens and text, which can no longer
          change; the last one has the `Answer`. They come from `Balancer.generate` (`services.launch.balancer`, through
          `resume`) and `CoordinatorClient` (`services.coordinator.client`): rows 3 and 4 of docs/overview.md
  write   `dialects`: `AnswerWriter.update` turns an output into events: `PartReader` (`parts`) finds text, reasoning
          and tool calls in it, `ResponsesWriter` writes them in the words of its API. The last event comes from its
          `_end`, within the last update; in completions also from `finish`
  send    `reply`: `HttpReply.send` sends in time or raises SlowReader, the first events with the headers; `end` ends
          the stream; after an error `refuse` sends the event of `AnswerWriter.error`"""
