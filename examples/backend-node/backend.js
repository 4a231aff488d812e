'use strict';
// How a Node backend calls loraplex: one deadline for all attempts, retries that make sense, progress, previews,
// errors with their remedy, cancellation.
//
//   npm ci && node backend.js        # while `make run` runs; LORAPLEX_EXECUTOR names another executor

const { randomInt } = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');
const { setTimeout: pause } = require('node:timers/promises');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');
const { explain, isWorthARetry } = require('./errors');

const PROTOS = path.join(__dirname, '../../protos');
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 10_000;

function connect(address) {
  const definition = protoLoader.loadSync('loraplex/v1/executor.proto', {
    includeDirs: [PROTOS],
    keepCase: true, // the field names of the protos
    longs: String, // a seed may be larger than a number of JavaScript holds
    enums: String,
    defaults: true,
    oneofs: true, // a message says in `event` which of its events it is
  });
  const { Executor } = grpc.loadPackageDefinition(definition).loraplex.v1;
  return new Executor(address, grpc.credentials.createInsecure(), {
    'grpc.max_receive_message_length': 96 << 20, // an image arrives in one message; the default is 4 MiB
    'grpc.keepalive_time_ms': 30_000,
    'grpc.keepalive_timeout_ms': 10_000,
  });
}

/** Starts a generation: an async iterable of events, with `cancel()`. `deadline` is in milliseconds since 1970. */
function generate(executor, request, { requestId, deadline }) {
  const metadata = new grpc.Metadata();
  metadata.set('x-request-id', requestId);
  return executor.Generate(request, metadata, { deadline });
}

/** The images and the summary of a request, within `withinMs` milliseconds. Throws what `explain` says of the last error. */
async function draw(executor, request, { requestId, withinMs = 60_000, onEvent = () => {} }) {
  const deadline = Date.now() + withinMs;
  const seeded = { seed: String(randomInt(2 ** 31)), ...request }; // every attempt makes the same image
  for (let attempt = 0; ; attempt += 1) {
    try {
      const result = { images: [], summary: undefined };
      for await (const message of generate(executor, seeded, { requestId, deadline })) {
        onEvent(message);
        if (message.event === 'image') result.images.push(message.image);
        if (message.event === 'summary') result.summary = message.summary;
      }
      return result;
    } catch (error) {
      if (error.code === undefined) throw error; // none of gRPC's
      const explained = explain(error);
      const wantedMs = explained.retryAfterMs ?? Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** attempt);
      const pauseMs = wantedMs * (1 + Math.random() / 2); // so that not all come back at once
      if (!isWorthARetry(explained) || Date.now() + pauseMs >= deadline) throw explained;
      await pause(pauseMs);
    }
  }
}

function show(message) {
  const { adapter_ready: ready, step_done: done, preview } = message;
  if (message.event === 'adapter_ready') console.log(`adapter ${ready.ref}: rank ${ready.rank}, ${ready.ready_from}`);
  if (message.event === 'preview') console.log(`preview after step ${preview.step}: ${preview.data.length > 0}`);
  if (message.event === 'step_done' && done.step === done.num_inference_steps) console.log(`${done.step} steps done`);
}

async function main() {
  const executor = connect(process.env.LORAPLEX_EXECUTOR || '127.0.0.1:50061');

  const request = {
    prompt: 'a cat on a blue background',
    adapters: [{ ref: 'sketch', strength: 0.8 }],
    preview_every_steps: 4,
  };
  const result = await draw(executor, request, { requestId: 'node-1', onEvent: show });
  fs.writeFileSync('backend-node.png', result.images[0].data);
  const { steps, recompilations } = result.summary;
  console.log(`backend-node.png, ${steps} steps, ${recompilations} recompilations`);

  for (const wrong of [{ prompt: 'a cat', adapters: [{ ref: 'no-such-adapter' }] }, { prompt: '' }]) {
    try {
      await draw(executor, wrong, { requestId: 'node-2' });
    } catch ({ code, reason, field, message }) {
      console.log(`${code} ${reason}${field ? ` (field ${field})` : ''}: ${message}`);
    }
  }

  const call = generate(executor, { ...request, num_inference_steps: 100 }, {
    requestId: 'node-3', deadline: Date.now() + 60_000,
  });
  try {
    for await (const message of call) if (message.event === 'queued') call.cancel();
  } catch (error) {
    console.log(`${explain(error).code}: ${explain(error).message}`);
  }
  executor.close();
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
