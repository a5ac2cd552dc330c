"""How a call says where it belongs: request headers, or the same fields in the body under `hexrepro` (OpenAI's `extra_body`).

| header | body field | meaning |
|---|---|---|
| X-Hexrepro-Query | query | calls with the same id belong to one query; without it a call is a query of its own |
| X-Hexrepro-Stage | stage | what kind of call it is; lengths are learned by stage |
| X-Hexrepro-Workflow | workflow | the application; stages of different workflows are kept apart |
| X-Hexrepro-SLO | slo_s | seconds that the whole query may take; that of its first call counts |
| X-Hexrepro-Tenant | tenant | for whom; where there are API keys, the key decides |
| X-Hexrepro-Final | final | `true`: the query ends with this call |
| X-Hexrepro-Output-Tokens | output_tokens | the length that the client expects, of each sequence |

Answers carry X-Hexrepro-Instance, the instance that gave them.
"""

QUERY = "X-Hexrepro-Query"
STAGE = "X-Hexrepro-Stage"
WORKFLOW = "X-Hexrepro-Workflow"
SLO = "X-Hexrepro-SLO"
TENANT = "X-Hexrepro-Tenant"
FINAL = "X-Hexrepro-Final"
OUTPUT_TOKENS = "X-Hexrepro-Output-Tokens"
INSTANCE = "X-Hexrepro-Instance"

# A client's trace context (W3C) goes on to the server, whose spans then hang under the client's. Not its X-Request-Id: vLLM
# takes that for the name of the request, and an agent may give one to several calls.
PASSED_ON = ("traceparent", "tracestate")

BODY_FIELD = "hexrepro"
FIELDS = {
    "query": QUERY,
    "stage": STAGE,
    "workflow": WORKFLOW,
    "slo_s": SLO,
    "tenant": TENANT,
    "final": FINAL,
    "output_tokens": OUTPUT_TOKENS,
}
