//! Servers and bridges that die at random moments, under changes, until everything is as the engines are.
//!
//! Two real servers are fed by one real bridge process per worker. After each death both
//! servers must come to hold exactly what the workers hold, with no help from the engine.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::binaries::{Running, client, held, prefixes};
use common::publisher::{Event, Publisher, batch};
use common::server::free_address;
use common::{PAUSE, TRIES};
use sgl_kv_indexer::pb::admin::admin_client::AdminClient;
use sgl_kv_indexer::pb::admin::{DropWorkerRequest, ListWorkersRequest, StreamState};

/// Blocks that the workers' caches are made of.
const BLOCKS: i64 = 3_000;

/// Deaths in a run.
const ROUNDS: u64 = 24;

/// Numbers that look random and repeat.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % limit
    }
}

/// A worker: its engine's publisher and cache, and the bridge that follows it.
struct Worker {
    name: String,
    publisher: Publisher,
    holds: BTreeSet<i64>,
    bridge: Option<Running>,
}

impl Worker {
    async fn start(name: &str, servers: &str) -> Worker {
        let publisher = Publisher::bind("").await;
        let mut worker = Worker { name: name.to_owned(), publisher, holds: BTreeSet::new(), bridge: None };
        worker.follow(servers).await;
        worker
    }

    /// Has the publisher followed by a new bridge, which knows nothing of what was before.
    async fn follow(&mut self, servers: &str) {
        // The old one is gone before the new one's subscription is waited for.
        drop(self.bridge.take());
        let more = [("KV_INDEXER_IDLE_REPORT_MS", "20")];
        self.bridge = Some(Running::bridge(&self.name, servers, &self.publisher.endpoint, &more));
        self.publisher.joined().await;
        self.holds.clear();
    }

    async fn change(&mut self, seeded: &mut Seeded) {
        let from = seeded.below(BLOCKS as u64 - 200) as i64;
        let blocks: Vec<i64> = (from..from + 1 + seeded.below(200) as i64).collect();
        let event = match seeded.below(8) {
            0 => Event::Cleared,
            1..=3 => Event::Removed(blocks),
            _ => Event::Stored(blocks),
        };
        match &event {
            Event::Cleared => self.holds.clear(),
            Event::Removed(blocks) => self.holds.retain(|block| !blocks.contains(block)),
            Event::Stored(blocks) => self.holds.extend(blocks),
        }
        self.publisher.send(batch(&[event])).await;
    }
}

/// Waits until a server holds what the workers hold.
async fn until_settled(address: &str, workers: &[Worker], round: u64) {
    let mut router = client(address).await;
    let wanted: BTreeMap<&str, &BTreeSet<i64>> = workers
        .iter()
        .filter(|worker| !worker.holds.is_empty())
        .map(|worker| (worker.name.as_str(), &worker.holds))
        .collect();
    for tries in 0..=TRIES {
        let found = held(&mut router, 0..BLOCKS).await;
        let found: BTreeMap<&str, BTreeSet<i64>> = found
            .iter()
            .map(|(worker, held)| (worker.as_str(), held.keys().map(|(_, block)| *block).collect()))
            .collect();
        if found.iter().map(|(worker, held)| (*worker, held)).eq(wanted.iter().map(|(w, h)| (*w, *h))) {
            return;
        }
        let counts = |held: BTreeMap<&str, usize>| format!("{held:?}");
        assert!(
            tries < TRIES,
            "round {round}, {address}: blocks {} instead of {}",
            counts(found.iter().map(|(worker, held)| (*worker, held.len())).collect()),
            counts(wanted.iter().map(|(worker, held)| (*worker, held.len())).collect()),
        );
        tokio::time::sleep(PAUSE).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_dies_the_replicas_come_to_hold_what_the_workers_hold() {
    let addresses = [free_address(), free_address()].map(|address| address.to_string());
    let urls = format!("{},http://{}", addresses[0], addresses[1]);
    let mut servers = [None, None];
    for (server, address) in servers.iter_mut().zip(&addresses) {
        *server = Some(Running::server(address).0);
    }
    let mut workers = [Worker::start("w0", &urls).await, Worker::start("w1", &urls).await];
    let mut seeded = Seeded(7);
    for round in 0..ROUNDS {
        for _ in 0..seeded.below(30) {
            let worker = seeded.below(2) as usize;
            workers[worker].change(&mut seeded).await;
        }
        let chosen = seeded.below(2) as usize;
        if seeded.below(3) > 0 {
            drop(servers[chosen].take());
            for _ in 0..seeded.below(10) {
                workers[0].change(&mut seeded).await;
            }
            servers[chosen] = Some(Running::server(&addresses[chosen]).0);
        } else {
            workers[chosen].follow(&urls).await;
        }
        for _ in 0..seeded.below(10) {
            let worker = seeded.below(2) as usize;
            workers[worker].change(&mut seeded).await;
        }
        for address in &addresses {
            until_settled(address, &workers, round).await;
        }
        // Replicas that have caught up answer alike.
        let prompt: Vec<i64> = (seeded.below(1_000) as i64..BLOCKS).collect();
        let [one, other] = [client(&addresses[0]).await, client(&addresses[1]).await];
        let [mut one, mut other] = [one, other];
        assert_eq!(prefixes(&mut one, &prompt).await, prefixes(&mut other, &prompt).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_an_operator_drops_comes_back_whole_while_its_bridge_lives() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut workers = [Worker::start("w0", &address).await];
    let mut seeded = Seeded(11);
    for _ in 0..20 {
        workers[0].change(&mut seeded).await;
    }
    workers[0].holds.extend(0..100);
    workers[0].publisher.send(batch(&[Event::Stored((0..100).collect())])).await;
    until_settled(&address, &workers, 0).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{address}")).expect("a URL");
    let mut admin = AdminClient::new(channel.connect().await.expect("a server"));
    for round in 1..=3 {
        let dropped = admin.drop_worker(DropWorkerRequest { worker_id: "w0".to_owned() }).await;
        assert!(dropped.expect("an answer").into_inner().existed, "round {round}");
        // Its next report finds that the server does not know it, and tells everything.
        until_settled(&address, &workers, round).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_ready_once_its_bridges_have_brought_it_up_to_date() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let workers = [Worker::start("w0", &address).await, Worker::start("w1", &address).await];
    until_settled(&address, &workers, 0).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{address}")).expect("a URL");
    let mut admin = AdminClient::new(channel.connect().await.expect("a server"));
    for tries in 0..=TRIES {
        let listed = admin.list_workers(ListWorkersRequest::default()).await.expect("a list").into_inner();
        let states: Vec<StreamState> = listed.workers.iter().map(|worker| worker.stream()).collect();
        if states == [StreamState::Synchronised; 2] {
            break;
        }
        assert!(tries < TRIES, "{states:?}");
        tokio::time::sleep(PAUSE).await;
    }
}
