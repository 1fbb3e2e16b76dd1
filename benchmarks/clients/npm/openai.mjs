// OpenAI's package for JavaScript.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { isWeather, model, question, run, url, weather } from './checks.js';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'unused', maxRetries: 0 });
const named = { name: 'get_weather', description: 'The weather in a city', parameters: weather };
const tools = [{ type: 'function', function: { ...named, strict: true } }];
const messages = [{ role: 'user', content: question }];

await run(['openai'], {
  async a_chat_streamed_and_whole() {
    const ask = { model, messages, max_completion_tokens: 16, temperature: 0 };
    const whole = await client.chat.completions.create(ask);
    const stream = await client.chat.completions.create({ ...ask, stream: true });
    let text = '';
    for await (const part of stream) text += part.choices[0]?.delta?.content ?? '';
    assert.equal(text, whole.choices[0].message.content);
    assert.ok(text);
  },
  async tools_streamed_and_whole() {
    const ask = {
      model, messages, tools, tool_choice: 'required', parallel_tool_calls: false, temperature: 0,
      max_completion_tokens: 400,
    };
    const whole = await client.chat.completions.create(ask);
    const [call] = whole.choices[0].message.tool_calls;
    isWeather(call.function.arguments);
    const final = await client.chat.completions.stream(ask).finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  },
  async its_own_loop_over_tools() {
    const asked = [];
    const runner = client.chat.completions.runTools(
      {
        model, messages, max_completion_tokens: 400, temperature: 0,
        tool_choice: { type: 'function', function: { name: 'get_weather' } },
        tools: [{
          type: 'function',
          function: { ...named, parse: JSON.parse, function: (given) => asked.push(given) && 'Sunny.' },
        }],
      },
    );
    await runner.done();
    isWeather(asked[0]);
  },
  async responses_streamed_and_whole() {
    const ask = {
      model, input: messages, tools: [{ type: 'function', ...named, strict: true }],
      tool_choice: 'required', parallel_tool_calls: false, temperature: 0, max_output_tokens: 400,
    };
    const whole = await client.responses.create(ask);
    isWeather(whole.output.at(-1).arguments);
    const final = await client.responses.stream(ask).finalResponse();
    assert.equal(final.output.at(-1).arguments, whole.output.at(-1).arguments);
    assert.ok(final.usage.output_tokens > 0);
  },
  async embeddings() {
    const both = await client.embeddings.create({ model, input: [question, 'Bread is baked.'] });
    const size = both.data[0].embedding.reduce((sum, x) => sum + x * x, 0);
    assert.ok(Math.abs(size - 1) < 1e-4);
    assert.equal(both.data.length, 2);
  },
});
