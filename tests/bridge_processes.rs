//! The real bridge process between publishers that fail and servers that die.
//!
//! What must hold is asked from a real server; waiting is bounded by tries.

mod common;

use std::collections::BTreeMap;

use common::binaries::{Held, Running, client, held, wait_for};
use common::bridge::numbered;
use common::publisher::Publisher;
use common::{PAUSE, TRIES};
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use tonic::transport::Channel;

/// Asks until the worker holds exactly `wanted` of the blocks below `upto`, all at HBM.
async fn until_held(router: &mut KvIndexerClient<Channel>, worker: &str, upto: i64, wanted: &[i64]) {
    let wanted: Held = wanted.iter().map(|hash| ((1, *hash), 0)).collect();
    let mut found = BTreeMap::new();
    for _ in 0..TRIES {
        found = held(router, 0..upto).await;
        if found.get(worker).cloned().unwrap_or_default() == wanted {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("{worker} holds {found:?} instead of {wanted:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_bridge_leaves_nothing_to_the_next_one() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut publisher = Publisher::bind("").await;
    let bridge = Running::bridge("w0", &address, &publisher.endpoint, &[]);
    let other = Publisher::bind("").await;
    publisher.joined().await;
    for number in 0..4 {
        publisher.send_frames(numbered(number)).await;
    }
    wait_for(&mut router, "w0", 3).await;
    // Killed without a word; what it reported is still there.
    drop(bridge);
    until_held(&mut router, "w0", 10, &[0, 1, 2, 3]).await;

    // The next one clears, whether its publisher says anything or not, and follows what comes.
    let bridge = Running::bridge("w0", &address, &other.endpoint, &[]);
    until_held(&mut router, "w0", 10, &[]).await;
    drop(bridge);
    let _bridge = Running::bridge("w0", &address, &publisher.endpoint, &[]);
    publisher.joined().await;
    publisher.send_frames(numbered(4)).await;
    until_held(&mut router, "w0", 10, &[4]).await;
}
