'use strict';
// What a failed call says: google.rpc.Status in the trailer `grpc-status-details-bin`, and its details by their types.

const grpc = require('@grpc/grpc-js');
const protobuf = require('protobufjs');

// The fields of google/rpc/status.proto and error_details.proto that loraplex sends.
const root = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message BadRequest {
    message FieldViolation { string field = 1; string description = 2; }
    repeated FieldViolation field_violations = 1;
  }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
`, { keepCase: true }).root;

/**
 * {code, reason, message, remedy, field, retryAfterMs, metadata} of an error of grpc-js.
 * `reason` is '' when it comes from gRPC itself and not from loraplex: no service there, a deadline, a cancel.
 */
function explain(error) {
  const explained = {
    code: grpc.status[error.code], reason: '', message: error.details, remedy: '', field: '', retryAfterMs: undefined,
    metadata: {},
  };
  const [packed] = error.metadata ? error.metadata.get('grpc-status-details-bin') : [];
  if (!packed) return explained;
  for (const detail of root.lookupType('Status').decode(packed).details) {
    const name = detail.type_url.split('/').pop();
    const read = (type) => root.lookupType(type).decode(detail.value);
    if (name === 'google.rpc.ErrorInfo') {
      const info = read('ErrorInfo');
      if (info.domain !== 'loraplex') continue;
      Object.assign(explained, { reason: info.reason, remedy: info.metadata.remedy || '', metadata: info.metadata });
    } else if (name === 'google.rpc.BadRequest') {
      explained.field = read('BadRequest').field_violations[0].field;
    } else if (name === 'google.rpc.RetryInfo') {
      const { seconds, nanos } = read('RetryInfo').retry_delay;
      explained.retryAfterMs = Number(seconds) * 1000 + nanos / 1e6;
    }
  }
  return explained;
}

/** Whether the same request may succeed later: the service says when, or was not there. */
function isWorthARetry(explained) {
  return explained.retryAfterMs !== undefined || explained.code === 'UNAVAILABLE';
}

module.exports = { explain, isWorthARetry };
