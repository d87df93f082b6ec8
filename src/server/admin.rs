//! What an operator asks and tells: `kv_indexer.admin.v1.Admin`.
//!
//! Calls are few and may be long, so all of it runs on the blocking pool, and one
//! page is made at a time. A page costs a look at every worker's id without any lock, and the
//! index's lock for [`WORKERS_AT_ONCE`] workers at once. Both a page's rows
//! and its bytes are bounded. How a drop gets the better of batches that wait is `drops`' matter.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::drops::Drops;
use super::observe::{Heard, Recorder};
use super::readiness::Stream;
use super::service::run;
use crate::arena::{CacheSpec, Index, Label, Labels, Tier, WorkerId};
use crate::pb::WorkerCacheSpec;
use crate::pb::admin::admin_server::Admin;
use crate::pb::admin::{
    DropWorkerRequest, DropWorkerResponse, ListWorkersRequest, ListWorkersResponse, StreamState, TierBlocks,
    Worker,
};

/// Most workers of a page, and how many it has unless told otherwise.
const PAGE_MAX: usize = 1_000;
const PAGE_DEFAULT: usize = 100;

/// Ids and addresses of a page, in bytes; one worker is listed however long its are.
const PAGE_BYTES_MAX: usize = 1024 * 1024;

/// Workers that are looked at while the lock is held.
const WORKERS_AT_ONCE: usize = 64;

/// The admin service.
#[derive(Debug)]
pub(super) struct Operator {
    index: Arc<Index>,
    drops: Arc<Drops>,
    recorder: Arc<Recorder>,
    /// Whose turn it is to make a page.
    turn: Semaphore,
}

impl Operator {
    pub(super) fn new(index: Arc<Index>, drops: Arc<Drops>, recorder: Arc<Recorder>) -> Self {
        Operator { index, drops, recorder, turn: Semaphore::new(1) }
    }
}

#[tonic::async_trait]
impl Admin for Operator {
    async fn list_workers(
        &self,
        request: Request<ListWorkersRequest>,
    ) -> Result<Response<ListWorkersResponse>, Status> {
        let ListWorkersRequest { after, limit } = request.into_inner();
        let limit = match usize::try_from(limit) {
            Ok(0) => PAGE_DEFAULT,
            Ok(limit) if limit <= PAGE_MAX => limit,
            _ => return Err(Status::invalid_argument(format!("limit is above {PAGE_MAX}"))),
        };
        // The semaphore is never closed; without a turn the page would be made all the same.
        let _turn = self.turn.acquire().await;
        let (index, recorder) = (Arc::clone(&self.index), Arc::clone(&self.recorder));
        Ok(Response::new(run(false, move || list(&index, &recorder, after, limit)).await?))
    }

    async fn drop_worker(
        &self,
        request: Request<DropWorkerRequest>,
    ) -> Result<Response<DropWorkerResponse>, Status> {
        let worker_id = request.into_inner().worker_id;
        if worker_id.is_empty() {
            return Err(Status::invalid_argument("worker_id is empty"));
        }
        let (index, recorder) = (Arc::clone(&self.index), Arc::clone(&self.recorder));
        // Here and not on the other thread, which batches that came before may keep busy.
        self.drops.begin(&worker_id);
        let existed = run(false, move || {
            let existed = index.remove_worker(&worker_id);
            if existed {
                recorder.dropped(&worker_id);
                tracing::info!(worker = worker_id, "worker dropped, as an operator asked");
            }
            existed
        });
        Ok(Response::new(DropWorkerResponse { existed: existed.await? }))
    }
}

/// The first page of workers after one that are still there.
fn list(index: &Index, recorder: &Recorder, mut after: String, limit: usize) -> ListWorkersResponse {
    let labels = index.read().labels();
    loop {
        let (page, more) = page(&labels, &after, limit);
        let workers = rows(index, recorder, &labels, &page);
        match page.last() {
            // All of them have gone meanwhile, and a page of nothing could not be gone on from.
            Some((last, _)) if more && workers.is_empty() => (*last).clone_into(&mut after),
            _ => return ListWorkersResponse { workers, more },
        }
    }
}

/// A worker by its id, in the order of pages.
type Listed<'a> = (&'a str, WorkerId);

/// The workers with the lowest ids above `after`, and whether there are more.
fn page<'a>(labels: &'a Labels, after: &str, limit: usize) -> (Vec<Listed<'a>>, bool) {
    let mut lowest = BinaryHeap::with_capacity(limit + 2);
    for (worker, label) in labels.iter().filter(|(_, label)| label.id() > after) {
        lowest.push((label.id(), worker));
        if lowest.len() > limit + 1 {
            lowest.pop();
        }
    }
    let mut found = lowest.into_sorted_vec();
    let all = found.len();
    found.truncate(limit);
    let mut bytes = 0;
    let fitting = found.iter().take_while(|(id, worker)| {
        let is_first = bytes == 0;
        bytes += id.len() + address(labels, *worker).len();
        is_first || bytes <= PAGE_BYTES_MAX
    });
    let fitting = fitting.count();
    found.truncate(fitting);
    (found, fitting < all)
}

fn address(labels: &Labels, worker: WorkerId) -> &str {
    labels.get(worker).map_or("", Label::address)
}

/// What is known of the workers of a page that are still there.
fn rows(index: &Index, recorder: &Recorder, labels: &Labels, page: &[Listed<'_>]) -> Vec<Worker> {
    let mut rows = Vec::with_capacity(page.len());
    for some in page.chunks(WORKERS_AT_ONCE) {
        let heard = recorder.heard(some.iter().map(|(id, _)| *id));
        let view = index.read();
        for (&(id, worker), heard) in some.iter().zip(heard) {
            if view.find_worker(id) != Some(worker) {
                continue;
            }
            let held = Tier::ALL.map(|tier| (tier, view.holdings(worker, tier)));
            let held = held.into_iter().filter(|(_, blocks)| *blocks > 0);
            rows.push(Worker {
                id: id.to_owned(),
                address: address(labels, worker).to_owned(),
                cache_spec: view.cache_spec(worker).map(spec),
                blocks: held.map(|(tier, blocks)| TierBlocks { tier: tier.wire(), blocks }).collect(),
                last_seq: view.last_seq(worker),
                last_heard_ms: heard.map(ago_ms),
                silent: view.is_silent(worker),
                stream: stream(heard).into(),
            });
        }
    }
    rows
}

fn spec(spec: CacheSpec) -> WorkerCacheSpec {
    let CacheSpec { version, components, swa_window_tokens, full_tier_mask, swa_tier_mask, mamba_tier_mask } =
        spec;
    WorkerCacheSpec { version, components, swa_window_tokens, full_tier_mask, swa_tier_mask, mamba_tier_mask }
}

fn ago_ms(heard: Heard) -> u64 {
    Instant::now().saturating_duration_since(heard.when()).as_millis().try_into().unwrap_or(u64::MAX)
}

fn stream(heard: Option<Heard>) -> StreamState {
    match heard.and_then(|heard| heard.stream()) {
        None => StreamState::Unknown,
        Some(Stream::Synchronising) => StreamState::Synchronising,
        Some(Stream::Synchronised) => StreamState::Synchronised,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Batch;

    fn index(workers: &[(&str, &str)]) -> Index {
        let index = Index::new();
        for (worker_id, worker_address) in workers {
            let batch = Batch { worker_id, worker_address, cache_spec: None, seq: 1, actions: &[] };
            index.apply(&batch).expect("applied");
        }
        index
    }

    #[test]
    fn pages_are_in_order_and_know_whether_more_follow() {
        let index = index(&["b", "d", "a", "c"].map(|id| (id, "")));
        let labels = index.read().labels();
        for (after, limit, expected, more) in [
            ("", 2, &["a", "b"][..], true),
            ("b", 2, &["c", "d"], false),
            ("aa", 10, &["b", "c", "d"], false),
            ("", 4, &["a", "b", "c", "d"], false),
            ("", 3, &["a", "b", "c"], true),
            ("d", 1, &[], false),
        ] {
            let (found, has_more) = page(&labels, after, limit);
            let ids: Vec<_> = found.iter().map(|(id, _)| *id).collect();
            assert_eq!((&ids[..], has_more), (expected, more), "{after:?} {limit}");
        }
    }

    #[test]
    fn long_names_make_short_pages_of_one_worker_at_least() {
        let long = "x".repeat(PAGE_BYTES_MAX);
        let index = index(&[("a", &long), ("b", &long), ("c", "")]);
        let recorder = Recorder::new();
        let mut after = String::new();
        for (id, more) in [("a", true), ("b", true), ("c", false)] {
            let found = list(&index, &recorder, after, PAGE_MAX);
            assert_eq!((found.workers.len(), found.more), (1, more), "{id}");
            assert_eq!(found.workers[0].id, id);
            after = id.to_owned();
        }
    }

    #[test]
    fn workers_that_went_meanwhile_do_not_end_the_list() {
        let index = index(&["a", "b", "c"].map(|id| (id, "")));
        let labels = index.read().labels();
        index.remove_worker("a");
        let recorder = Recorder::new();
        let (first, _) = page(&labels, "", 1);
        assert_eq!((first[0].0, rows(&index, &recorder, &labels, &first).len()), ("a", 0));
        assert_eq!(list(&index, &recorder, String::new(), 1).workers[0].id, "b");
    }
}
