// Runs the checks of one script and tells of each as a JSON line, as worker.py does.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import path from 'node:path';

export const [url, model] = process.argv.slice(2);
export const cities = ['Oslo', 'Rome', 'Lima'];
export const question = 'What will the weather be in Rome for the next two days?';
export const weather = {
  type: 'object',
  properties: {
    city: { type: 'string', enum: cities },
    days: { type: 'integer', minimum: 1, maximum: 7 },
  },
  required: ['city', 'days'],
  additionalProperties: false,
};

export function isWeather(given) {
  const values = typeof given === 'string' ? JSON.parse(given) : given;
  assert.deepEqual(Object.keys(values).sort(), ['city', 'days']);
  assert.ok(cities.includes(values.city), `city is ${values.city}`);
  assert.ok(Number.isInteger(values.days) && values.days >= 1 && values.days <= 7);
}

function versionOf(name) {
  const file = path.join(import.meta.dirname ?? '.', 'node_modules', name, 'package.json');
  return JSON.parse(readFileSync(file)).version;
}

export async function run(packages, checks) {
  const tell = (line) => console.log(JSON.stringify(line));
  tell({ versions: Object.fromEntries(packages.map((name) => [name, versionOf(name)])) });
  for (const [name, check] of Object.entries(checks)) {
    const begun = performance.now();
    let fault = null;
    try {
      await check();
    } catch (error) {
      fault = String(error.stack ?? error).slice(0, 3000);
      if (error.responseBody) fault += `\n${error.responseBody.slice(0, 500)}`;
    }
    tell({ check: name, fault, seconds: Math.round(performance.now() - begun) / 1e3 });
  }
}
