// openai for Node, with zod: chat, streams, strict tools that its runner calls, structured output, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ maxRetries: 0 });
const model = "scripted", ANSWER = "It is 18 degrees in Rome.", ROME = { city: "Rome", degrees: 18 };
const ask = [{ role: "user", content: "How is Rome?" }];
const asJson = [{ role: "user", content: "How is Rome? Answer as JSON." }];
const Weather = z.object({ city: z.string(), degrees: z.int() });

const { message } = (await client.chat.completions.create({ model, messages: ask })).choices[0];
assert.deepEqual([message.content, message.reasoning_content], [ANSWER, "Hm."]);
assert.equal(await client.chat.completions.stream({ model, messages: ask }).finalContent(), ANSWER);
const weather = zodFunction({ name: "weather", parameters: z.object({ city: z.string() }), function: () => "18 degrees" });
for (const stream of [false, true])
  assert.equal(await client.chat.completions.runTools({ model, messages: ask, tools: [weather], stream }).finalContent(), ANSWER);
const response_format = zodResponseFormat(Weather, "weather");
const parsed = await client.chat.completions.parse({ model, messages: asJson, response_format });
assert.deepEqual(parsed.choices[0].message.parsed, ROME);
const text = { format: zodTextFormat(Weather, "weather") };
assert.deepEqual((await client.responses.parse({ model, input: asJson, text })).output_parsed, ROME);
