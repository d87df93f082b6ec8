//! Sockets that fail without a word: publishers that fall silent, replays that lose what they
//! should give.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::bridge::{Bridge, numbered, until_stored};
use common::peer::{Answer, Peer, Replay, listen};
use common::publisher::Publisher;
use common::server::Recorder;
use sgl_kv_indexer::bridge::health::Incomplete;
use sgl_kv_indexer::bridge::zmtp::wire::{Command, Item, command};
use sgl_kv_indexer::pb::ExternalKvActionType as Type;

#[tokio::test]
async fn a_publisher_that_falls_silent_is_given_up_and_one_that_answers_is_kept() {
    let (listener, endpoint) = listen().await;
    let mut server = Recorder::start(&[]).await;
    let bridge = Bridge::start_with(&endpoint, &server.url(), &[], |config| {
        config.source.heartbeat = Duration::from_millis(500);
    });
    // It shakes hands and sends, and then neither answers nor closes.
    let mut silent = Peer::accept(&listener, "PUB").await;
    assert!(silent.send(&numbered(0)).await);
    until_stored(&mut server, 0).await;
    bridge.until(|now| now.health.disconnects == 1 && !now.health.connected).await;

    // One that answers is kept past any number of questions. A machine that stalls may be late with an answer
    // and lose the connection by right; then the next one has its turn.
    let mut kept = None;
    for _ in 0..20 {
        let mut peer = Peer::accept(&listener, "PUB").await;
        if answers(&mut peer, 3).await {
            kept = Some(peer);
            break;
        }
    }
    let mut answering = kept.expect("a connection that is kept");
    assert!(answering.send(&numbered(1)).await);
    until_stored(&mut server, 1).await;
    drop(silent);
    bridge.stop().await;
}

/// Answers so many questions; whether the connection lived to hear them.
async fn answers(peer: &mut Peer, mut pings: u32) -> bool {
    while pings > 0 {
        let Some(item) = peer.next().await else { return false };
        let Item::Command(body) = item else { continue };
        if let Ok(Command::Ping(context)) = command(&body) {
            pings -= u32::from(peer.pong(context).await);
        }
    }
    true
}

/// Batches of these numbers, and the end marker or not.
fn of(numbers: impl IntoIterator<Item = u64>, ended: bool) -> Answer {
    Answer { batches: numbers.into_iter().map(numbered).collect(), ended }
}

/// What a replay socket answers, by the number of questions before, from where it is asked, and the
/// first number that the publisher has not sent.
type Script = fn(usize, u64, u64) -> Answer;

/// Follows a publisher of twelve batches whose subscriber joins after the sixth and loses the ninth and tenth.
async fn follow(name: &str, script: Script, lost: &[u64], why: Option<Incomplete>, failures: bool) {
    let sent = Arc::new(AtomicU64::new(6));
    let upto = Arc::clone(&sent);
    let replay = Replay::start(move |before, from| script(before, from, upto.load(Ordering::SeqCst))).await;
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    let bridge = Bridge::start_with(&publisher.endpoint, &server.url(), &[], |config| {
        // A silence that never comes needs no short patience, which a machine that stalls might try.
        if failures {
            config.source.heartbeat = Duration::from_secs(2);
        }
        config.source.replay = Some(replay.endpoint.clone());
    });
    publisher.joined().await;
    for number in 6..12 {
        // Before it arrives, as an engine keeps a batch before it sends it.
        sent.store(number + 1, Ordering::SeqCst);
        if !(8..10).contains(&number) {
            publisher.send_frames(numbered(number)).await;
        }
    }
    let requests = until_stored(&mut server, 11).await;
    let reports = requests.iter().flat_map(|request| &request.actions);
    let reports = reports.filter(|action| action.r#type() == Type::ActionReport);
    let stored: Vec<i64> = reports.flat_map(|action| action.hashes.clone()).collect();
    let lost: BTreeSet<i64> = lost.iter().map(|number| number.cast_signed()).collect();
    let expected: Vec<i64> = (0..12).filter(|number| !lost.contains(number)).collect();
    assert_eq!(stored, expected, "{name}: once each and in order, asked from {:?}", replay.asked());
    let now = bridge.until(|now| !now.repairing).await;
    assert_eq!(now.health.missing_batches, lost.len() as u64, "{name}");
    assert_eq!(now.health.incomplete.map(|(_, why)| why), why, "{name}");
    assert_eq!(now.health.replay_failures > 0, failures, "{name}");
    assert_eq!(replay.asked()[0], 0, "{name}: history from the beginning");
    bridge.stop().await;
}

#[tokio::test]
async fn a_replay_that_gives_all_leaves_nothing_out() {
    follow("whole", |_, from, upto| of(from..upto, true), &[], None, false).await;
}

#[tokio::test]
async fn a_replay_without_its_end_marker_is_asked_for_the_rest() {
    follow("no end", |before, from, upto| of(from..upto, before > 0), &[], None, true).await;
    follow("cut short", |before, from, upto| of(from..upto.min(from + 2), before > 2), &[], None, true).await;
}

#[tokio::test]
async fn a_replay_that_loses_its_middle_is_asked_for_it() {
    let hole: Script =
        |before, from, upto| of((from..upto).filter(|number| before > 1 || *number != 3), true);
    follow("a hole", hole, &[], None, false).await;
}

#[tokio::test]
async fn a_replay_that_begins_late_leaves_what_it_no_longer_has_missing() {
    let late: Script = |_, from, upto| of(from.max(4)..upto, true);
    follow("late", late, &[0, 1, 2, 3], Some(Incomplete::JoinedLate), false).await;
}

#[tokio::test]
async fn a_replay_that_never_answers_is_given_up() {
    let silent: Script = |_, _, _| of([], false);
    let lost = [0, 1, 2, 3, 4, 5, 8, 9];
    follow("silent", silent, &lost, Some(Incomplete::JoinedLate), true).await;
}
