"""Small chat templates that use the variables of well-known ones: tools, thinking, calls in messages, tool results."""

QWEN3 = """
{%- set ns = namespace(last=messages|length - 1) %}
{%- if tools or messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools %}
{{- '\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
{{- '\n</tools>\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content is string and message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function else call %}
{{- '\n<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}
"""

LLAMA31 = """
{{- bos_token }}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{% endif %}
{{- "Today: " + date_string + "\n<|eot_id|>" }}
{%- for message in messages %}
{%- if message.role == 'ipython' or message.role == 'tool' %}
{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
{{- message.content | tojson if message.content is mapping else message.content }}{{- "<|eot_id|>" }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception("only one call at once") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if loop.first and tools_in_user_message and tools is not none %}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\n\n" }}{% endfor %}
{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('an id of length 9, please') }}{% endif %}
{%- set out = call.function | tojson %}
{{- out[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""

HERMES = """
{%- macro describe(tool) %}
{{- {"name": tool.function.name, "parameters": tool.function.parameters} | tojson }}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\nYou may call functions: <tools> ' }}
{%- for tool in tools %}{{- describe(tool) }}{{- ' ' }}{% endfor %}
{{- '</tools> with <tool_call> tags.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- '<|im_start|>tool\n<tool_response>\n{"name": "' + message.name + '", "content": ' }}
{{- message.content + '}\n</tool_response><|im_end|>\n' }}
{%- elif message.role == "assistant" and message.tool_calls is defined %}
{{- '<|im_start|>assistant' }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n' + ({"name": call.function.name, "arguments": call.function.arguments} | tojson) }}
{{- '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# In the spirit of gpt-oss, with its peculiarities (see tokenizer_proc/harmony_prompt.py). It is not in TEMPLATES:
# conversations are changed before it gets them.
HARMONY = """
{%- macro about(tool) %}
{{- '// ' + tool.description + '\n' + tool.name + ': ' + (tool.parameters | tojson) + '\n' }}
{%- endmacro %}
{%- if model_identity is not defined %}{% set model_identity = 'You are a model.' %}{% endif %}
{{- '<|start|>system<|message|>' + model_identity + '\nDate: ' + strftime_now('%Y') }}
{{- '\nReasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') }}
{%- for tool in builtin_tools or [] %}{{- '\nTool: ' + tool }}{% endfor %}
{{- '<|end|>' }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' or tools %}
{{- '<|start|>developer<|message|>' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- for tool in tools or [] %}{{- '\n' + about(tool.function) }}{% endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{- raise_exception('content and thinking') }}{% endif %}
{%- if message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
{%- endif %}
{%- set last.name = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{- raise_exception('no call before this result') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}{{- '<|end|>' }}
{%- elif message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

TEMPLATES = {"qwen3": QWEN3, "llama3.1": LLAMA31, "mistral": MISTRAL, "hermes": HERMES}
