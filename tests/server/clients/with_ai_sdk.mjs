// Vercel AI SDK: text, streams, tools, structured output, reasoning; over responses, chat and the generic provider.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { openai } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const ANSWER = "It is 18 degrees in Rome.", prompt = "How is Rome?";
const compatible = createOpenAICompatible({ name: "here", baseURL: process.env.OPENAI_BASE_URL, supportsStructuredOutputs: true });
const weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async () => "18 degrees" });
const schema = z.object({ city: z.string(), degrees: z.int() });

for (const model of [openai("scripted"), openai.chat("scripted"), compatible("scripted")]) {
  assert.equal((await generateText({ model, prompt })).text, ANSWER);
  assert.equal(await streamText({ model, prompt }).text, ANSWER);
  const run = await generateText({ model, prompt, tools: { weather }, stopWhen: stepCountIs(3) });
  assert.deepEqual([run.text, run.steps.length], [ANSWER, 2]);
  const { output } = await generateText({ model, prompt: `${prompt} Answer as JSON.`, output: Output.object({ schema }) });
  assert.deepEqual(output, { city: "Rome", degrees: 18 });
}
assert.equal((await generateText({ model: compatible("scripted"), prompt })).reasoningText, "Hm.");
