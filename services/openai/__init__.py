"""The HTTP port: OpenAI's API, Anthropic's messages and vLLM's tokenization. Bodies become requests of the library; its
answers and errors become responses and events.

Below is the path of a call that generates, in the order in which the code is best read. The dialect of an endpoint
(in `completions`, `responses`, `anthropic`) knows its bodies and events; everything else is common.

  call    `server`: `OpenAiServer._generate`: `_read` reads the body, `_within` limits the time, `_decode` does what
          follows
  read    `responses`: `ResponsesDialect.read`, for example: `BodyForm.read` (`dialects`) checks the body by the forms
          of `bodies`, which need not be opened; `chat_request` (`requests`) makes a `CompletionRequest` of it, as for
          completions and chats
          -> `ApiCall` (`dialects`): a call of HTTP, not of a tool
  submit  `streaming`: `requests_of` makes requests of the library, `reply_with_answers` has them decoded:
          `RequestHandler.updates` (`services.gateway.request_handler`) admits them and yields their outputs
  write   `dialects`: `AnswerWriter.update` turns an output into events: `PartReader` (`parts`) finds text, reasoning
          and tool calls in it, `ResponsesWriter` writes them in the words of its API
  send    `streaming`: `HttpReply.send`, in time or not at all"""
