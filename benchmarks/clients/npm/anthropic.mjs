// Anthropic's package for JavaScript.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import { isWeather, model, question, run, url, weather } from './checks.js';

const client = new Anthropic({ baseURL: url, apiKey: 'unused', maxRetries: 0 });
const tools = [{ name: 'get_weather', description: 'The weather in a city', input_schema: weather }];
const messages = [{ role: 'user', content: question }];

await run(['@anthropic-ai/sdk'], {
  async a_message_streamed_and_whole() {
    const ask = { model, messages, max_tokens: 16, temperature: 0 };
    const whole = await client.messages.create(ask);
    assert.equal(await client.messages.stream(ask).finalText(), whole.content[0].text);
    assert.ok(whole.content[0].text);
    assert.equal(whole.usage.output_tokens, 16);
  },
  async a_tool_streamed_and_whole() {
    const ask = {
      model, messages, tools, max_tokens: 400, temperature: 0,
      tool_choice: { type: 'any', disable_parallel_tool_use: true },
    };
    const whole = await client.messages.create(ask);
    isWeather(whole.content[0].input);
    const final = await client.messages.stream(ask).finalMessage();
    assert.deepEqual(final.content[0].input, whole.content[0].input);
    assert.equal(final.stop_reason, 'tool_use');
  },
});
