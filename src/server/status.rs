//! Every error of the server as a gRPC status.
//!
//! Routers fall back to routing by load on `RESOURCE_EXHAUSTED`,
//! `DEADLINE_EXCEEDED`, `CANCELLED`, `OUT_OF_RANGE` and `UNAVAILABLE`; any other
//! code fails the request they were routing. So a code outside of these is for
//! callers who broke the contract, and for bugs.

use std::fmt;

use tonic::Status;

use super::admission::Refusal;
use super::drops::Overtaken;
use super::security::Denied;
use super::wire::RequestError;
use crate::arena::BatchError;

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        let text = error.to_string();
        match error {
            RequestError::TooManyActions | RequestError::TooManyHashes => Status::resource_exhausted(text),
            RequestError::Malformed(_)
            | RequestError::Truncated
            | RequestError::RaggedHashes { .. }
            | RequestError::TooMuchMetadata { .. }
            | RequestError::EmptyWorkerId
            | RequestError::NoHashes
            | RequestError::UnknownTier { .. }
            | RequestError::UnknownType { .. }
            | RequestError::NoActionHashes { .. }
            | RequestError::MetadataLength { .. } => Status::invalid_argument(text),
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.to_string();
        match refusal {
            Refusal::Overloaded { .. } => Status::resource_exhausted(text),
            Refusal::Late => Status::deadline_exceeded(text),
        }
    }
}

impl From<Denied> for Status {
    fn from(denied: Denied) -> Self {
        let text = denied.to_string();
        match denied {
            Denied::Unknown => Status::unauthenticated(text),
            Denied::NotAllowed => Status::permission_denied(text),
        }
    }
}

impl From<Overtaken> for Status {
    fn from(error: Overtaken) -> Self {
        // Bridges send again what was unavailable, and by then it is a later batch.
        Status::unavailable(error.to_string())
    }
}

impl From<BatchError> for Status {
    fn from(error: BatchError) -> Self {
        let text = error.to_string();
        match error {
            // Decoding has refused these already; the index checks for its embedders.
            BatchError::EmptyWorkerId | BatchError::NoHashes { .. } | BatchError::MetadataLength { .. } => {
                Status::invalid_argument(text)
            }
            BatchError::Full => Status::resource_exhausted(text),
        }
    }
}

/// Work that was handed to another thread and did not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interrupted {
    /// It panicked: a bug, and its thread's log says where.
    Panicked,
    /// The runtime stopped first.
    Stopped,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interrupted::Panicked => write!(f, "the call failed by a bug of the server"),
            Interrupted::Stopped => write!(f, "the server stops"),
        }
    }
}

impl std::error::Error for Interrupted {}

impl From<Interrupted> for Status {
    fn from(error: Interrupted) -> Self {
        let text = error.to_string();
        match error {
            Interrupted::Panicked => Status::internal(text),
            Interrupted::Stopped => Status::unavailable(text),
        }
    }
}
