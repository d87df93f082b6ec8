//! What a bridge does while its server does not answer: few and full RPCs afterwards, bounded memory
//! meanwhile, and everything told anew if more happened than waits.

mod common;

use std::collections::BTreeSet;

use common::bridge::{Bridge, apply, numbered, until_stored};
use common::publisher::{Event, Publisher, batch};
use common::server::Recorder;
use rmp::encode;
use sgl_kv_indexer::bridge::health::Incomplete;
use sgl_kv_indexer::bridge::{CHANGE_BYTES_RATIO, PENDING_BYTES_MAX};
use sgl_kv_indexer::limits::{ACTIONS_PER_APPLY_MAX, HASHES_PER_CALL_MAX};
use sgl_kv_indexer::pb::{ExternalKvAction, ExternalKvActionType as Type};

/// Sends batches while an RPC is held, and returns the actions and hashes of each RPC that carries them.
async fn merged(batches: &[Vec<Event>], last: i64) -> Vec<(usize, usize)> {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    server.hold(true);
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    // The clear that a bridge begins with is under way from here on.
    server.next().await;
    publisher.joined().await;
    for events in batches {
        publisher.send(batch(events)).await;
    }
    let number = batches.len() as u64 - 1;
    bridge.until(|now| now.last_sequence == Some(number)).await;
    server.hold(false);
    let requests = until_stored(&mut server, last).await;
    bridge.stop().await;
    let hashes = |request: &sgl_kv_indexer::pb::ApplyExternalKvBatchRequest| {
        request.actions.iter().map(|action| action.hashes.len()).sum()
    };
    // The held one is told of a second time where it was held for longer than an attempt may take.
    let sizes = requests.iter().filter(|request| request.seq > 1);
    sizes.map(|request| (request.actions.len(), hashes(request))).collect()
}

#[tokio::test]
async fn batches_that_arrive_during_an_rpc_go_in_as_few_as_the_contract_allows() {
    // Neighbouring stores become one action, split only by the number of hashes.
    let stores: Vec<Vec<Event>> =
        (0..400).map(|number| vec![Event::Stored((number * 100..(number + 1) * 100).collect())]).collect();
    let total = 400 * 100;
    let mut expected = vec![(1, HASHES_PER_CALL_MAX); total / HASHES_PER_CALL_MAX];
    expected.push((1, total % HASHES_PER_CALL_MAX));
    assert_eq!(merged(&stores, total as i64 - 1).await, expected);

    // Stores and removals in turn may not pass each other, so the number of actions splits them.
    let turns: Vec<Vec<Event>> =
        (0..400).map(|number| vec![Event::Removed(vec![number]), Event::Stored(vec![number + 1])]).collect();
    let mut expected = vec![(ACTIONS_PER_APPLY_MAX, ACTIONS_PER_APPLY_MAX); 800 / ACTIONS_PER_APPLY_MAX];
    expected.push((800 % ACTIONS_PER_APPLY_MAX, 800 % ACTIONS_PER_APPLY_MAX));
    assert_eq!(merged(&turns, 400).await, expected);
}

/// Blocks of one large batch.
const BLOCKS: u64 = 60_000;

/// Batches of them that are sent: half as many blocks again as wait for a server at most.
const SENT: u64 = 50;
const _: () = assert!(SENT * BLOCKS * 32 > PENDING_BYTES_MAX as u64 * 5 / 4);

/// A store of many blocks without their tokens.
fn large(number: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let write = &mut out;
    encode::write_array_len(write, 2).unwrap();
    encode::write_f64(write, 1.5).unwrap();
    encode::write_array_len(write, 1).unwrap();
    encode::write_array_len(write, 6).unwrap();
    encode::write_str(write, "BlockStored").unwrap();
    encode::write_array_len(write, BLOCKS as u32).unwrap();
    for block in number * BLOCKS..(number + 1) * BLOCKS {
        encode::write_uint(write, block).unwrap();
    }
    encode::write_nil(write).unwrap();
    encode::write_array_len(write, 0).unwrap();
    encode::write_uint(write, 16).unwrap();
    encode::write_nil(write).unwrap();
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_silent_for_long_is_told_everything_and_nothing_is_lost() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    server.hold(true);
    // More blocks than copies are counted of, so the stream is read as SGLang's is.
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[("KV_INDEXER_COPIES", "set")]);
    publisher.joined().await;
    let (mut highest, mut fell) = (0, false);
    for number in 0..SENT {
        publisher.send(large(number)).await;
        // The socket is read on, so the publisher never has to drop.
        let now = bridge.until(|now| now.last_sequence == Some(number)).await;
        let pending = now.servers[0].pending_bytes;
        fell |= pending < highest;
        highest = highest.max(pending);
    }
    let message = large(SENT - 1).len();
    assert!(highest <= PENDING_BYTES_MAX + CHANGE_BYTES_RATIO * message, "{highest} bytes");
    assert!(fell, "what waited was given up for the mirror");
    publisher.send(batch(&[Event::Removed((0..100).collect())])).await;
    bridge.until(|now| now.last_sequence == Some(SENT)).await;

    server.hold(false);
    let mut held = BTreeSet::new();
    let expected = (SENT * BLOCKS - 100) as usize;
    let mut clears = 0;
    while held.len() != expected || held.contains(&0) {
        let (request, _) = server.next().await;
        let is_clear = |action: &ExternalKvAction| action.r#type() == Type::ActionClearAllAtTier;
        clears += usize::from(request.actions.iter().any(is_clear));
        apply(&mut held, &request);
    }
    assert!(clears >= 2, "once at the start and once to begin anew: {clears}");
    let now = bridge.until(|now| now.servers[0].synchronised).await;
    assert_eq!((now.health.gaps, now.health.incomplete), (0, None));
    bridge.stop().await;
}

#[tokio::test]
async fn what_does_not_fit_the_mirror_is_left_out_and_told() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    let bridge =
        Bridge::start(&publisher.endpoint, &server.url(), &[("KV_INDEXER_MIRROR_MAX_BLOCKS", "100")]);
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored((0..90).collect())])).await;
    publisher.send(batch(&[Event::Stored((90..150).collect())])).await;
    publisher.send(batch(&[Event::Removed((0..90).collect()), Event::Stored((200..260).collect())])).await;
    let now = bridge.until(|now| now.last_sequence == Some(2)).await;
    assert_eq!(now.health.left_out_blocks, 60);
    assert!(matches!(now.health.incomplete, Some((_, Incomplete::Full))));
    let mut held = BTreeSet::new();
    until_stored(&mut server, 259).await.iter().for_each(|request| apply(&mut held, request));
    assert_eq!(held, (200..260).collect());
    bridge.stop().await;
}

#[tokio::test]
async fn a_server_that_never_answers_does_not_keep_a_bridge_from_stopping() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    server.hold(true);
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    server.next().await;
    publisher.joined().await;
    publisher.send_frames(numbered(0)).await;
    bridge.until(|now| now.servers[0].pending_bytes > 0).await;
    bridge.stop().await;
}
