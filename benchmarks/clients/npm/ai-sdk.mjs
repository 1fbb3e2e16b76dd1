// Vercel's AI SDK over three providers: chats, Responses and Messages.
import assert from 'node:assert/strict';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import * as ai from 'ai';
import { z } from 'zod';
import { cities, isWeather, model, question, run, url } from './checks.js';

const where = { apiKey: 'unused', baseURL: `${url}/v1` };
const providers = {
  chats: createOpenAICompatible({ ...where, name: 'octavo', supportsStructuredOutputs: true, includeUsage: true }),
  Responses: createOpenAI(where),
  Messages: createAnthropic(where),
};
const schema = z.object({ city: z.enum(cities), days: z.number().int().min(1).max(7) });
const get_weather = ai.tool({ description: 'The weather in a city', inputSchema: schema });
const limits = { maxRetries: 0, temperature: 0 };

const checks = {};
for (const [name, provider] of Object.entries(providers)) {
  const ask = { ...limits, model: provider(model) };
  Object.assign(checks, {
    [`text_${name}`]: async () => {
      const whole = await ai.generateText({ ...ask, prompt: question, maxOutputTokens: 16 });
      const stream = ai.streamText({ ...ask, prompt: question, maxOutputTokens: 16 });
      let text = '';
      for await (const piece of stream.textStream) text += piece;
      assert.equal(text, whole.text);
      assert.ok(text);
      assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
      assert.ok(whole.usage.outputTokens > 0);
    },
    [`tools_${name}`]: async () => {
      const tools = { get_weather };
      const more = { tools, toolChoice: 'required', prompt: question, maxOutputTokens: 400 };
      const whole = await ai.generateText({ ...ask, ...more });
      isWeather(whole.toolCalls[0].input);
      const stream = ai.streamText({ ...ask, ...more });
      isWeather((await stream.toolCalls)[0].input);
      assert.equal(await stream.finishReason, whole.finishReason);
    },
    [`a_loop_${name}`]: async () => {
      const asked = [];
      const tools = {
        get_weather: { ...get_weather, execute: async (given) => (asked.push(given), 'Sunny.') },
      };
      const result = await ai.generateText({
        ...ask, tools, prompt: question, maxOutputTokens: 400, stopWhen: ai.stepCountIs(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
      });
      asked.forEach(isWeather);
      assert.ok(asked.length >= 1);
      assert.equal(result.steps.length, 2);
      assert.ok(result.text);
    },
    [`an_object_${name}`]: async () => {
      const more = { prompt: question, maxOutputTokens: 400 };
      if (ai.generateObject) {
        isWeather((await ai.generateObject({ ...ask, ...more, schema })).object);
      }
      const made = await ai.generateText({ ...ask, ...more, output: ai.Output.object({ schema }) });
      isWeather(made.output);
    },
  });
}
checks.embeddings = async () => {
  const embedding = providers.chats.embeddingModel(model);
  const { embeddings } = await ai.embedMany({ model: embedding, values: [question, 'Bread.'], maxRetries: 0 });
  assert.equal(embeddings.length, 2);
  assert.ok(Math.abs(ai.cosineSimilarity(embeddings[0], embeddings[0]) - 1) < 1e-6);
};

await run(['ai', '@ai-sdk/openai-compatible', '@ai-sdk/openai', '@ai-sdk/anthropic'], checks);
