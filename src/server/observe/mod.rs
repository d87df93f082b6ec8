//! What the server shows of itself: metrics, state, probes, a page.
//!
//! [`Recorder`] is what calls write to, a few atomic additions each.
//! [`Observer`] reads it, the index and the workers' reports, and makes the pages
//! of the HTTP port. The index is looked at in short steps, and no more than once
//! in a while however many ask: see `snapshot`.

mod fleet;
mod metrics;
mod record;
mod snapshot;
mod state;

use std::sync::Arc;
use std::time::SystemTime;

use crate::arena::Index;
use crate::http::{Page, Pages, STATUS_PAGE};
use crate::server::admission::Admission;
use crate::server::instance::Instance;
use crate::server::memory::Budget;
use crate::server::readiness::{Readiness, Standing};

pub(in crate::server) use fleet::Heard;
pub(in crate::server) use record::{Method, Recorder, Refused, Running, ScanTimes};
use snapshot::Snapshots;

/// Everything that is shown.
#[derive(Debug)]
pub(in crate::server) struct Observer {
    recorder: Arc<Recorder>,
    admission: Arc<Admission>,
    budget: Arc<Budget>,
    snapshots: Snapshots,
    instance: Instance,
    started: SystemTime,
    readiness: Arc<Readiness>,
}

impl Observer {
    pub(in crate::server) fn new(
        index: Arc<Index>,
        recorder: Arc<Recorder>,
        admission: Arc<Admission>,
        budget: Arc<Budget>,
        readiness: Arc<Readiness>,
        instance: Instance,
    ) -> Self {
        let snapshots = Snapshots::new(index, Arc::clone(&recorder));
        let started = SystemTime::now();
        Observer { recorder, admission, budget, snapshots, instance, started, readiness }
    }

    /// The pages of the HTTP port.
    pub(in crate::server) fn pages(self: &Arc<Self>) -> Pages {
        let observer = Arc::clone(self);
        Arc::new(move |path| observer.page(path))
    }

    fn page(self: &Arc<Self>, path: &str) -> Option<Page> {
        match path {
            "/" => Some(Page::html(STATUS_PAGE)),
            // The process answers, so it lives.
            "/healthz" => Some(Page::probe(true, "ok")),
            "/readyz" => {
                let standing = self.readiness.standing();
                Some(Page::probe(standing == Standing::Ready, &standing.to_string()))
            }
            "/metrics" => Some(Page::metrics(metrics::text(self))),
            "/debug/state" => Some(Page::json(state::json(self))),
            _ => None,
        }
    }
}
