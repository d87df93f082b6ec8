//! Workers and their labels.
use super::WorkerId;
use std::sync::{Arc, OnceLock};

/// A worker's two names, and a place where an edge keeps its own encoding of them.
///
/// A label never changes: a new address makes a new label.
#[derive(Debug)]
pub struct Label {
    id: Box<str>,
    address: Box<str>,
    wire: OnceLock<Box<[u8]>>,
}

impl Label {
    /// The worker's name.
    pub fn id(&self) -> &str {
        &self.id
    }
    /// URL under which routers reach it; empty if none.
    pub fn address(&self) -> &str {
        &self.address
    }
    /// The edge's encoding of this label, made once by `encode`.
    pub fn wire(&self, encode: impl FnOnce(&Label) -> Box<[u8]>) -> &[u8] {
        self.wire.get_or_init(|| encode(self))
    }
}

/// The labels of all workers at one moment; keeping it holds up nothing.
#[derive(Debug, Clone, Default)]
pub struct Labels(Arc<Vec<Option<Arc<Label>>>>);

impl Labels {
    /// The label of `worker`, if it exists in this snapshot.
    pub fn get(&self, worker: WorkerId) -> Option<&Label> {
        self.0.get(worker.index())?.as_deref()
    }
}
