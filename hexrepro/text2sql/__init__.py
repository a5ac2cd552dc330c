"""A small Text-to-SQL agent in the manner of CHESS, a client of the gateway: `python -m hexrepro.text2sql "question"`.

agent.py      the workflow, top to bottom
prompts.py    what each stage is asked            answers.py   what is made of an answer
model.py      one LLM call: headers, record       database.py  the schema, and SQL run in `sandbox.py`
watch.py      the live picture                    benchmark.py many questions, accuracy and latency
railway.py    the example database; its questions are in data/text2sql/
"""
