//! The client against the real server, and against one that misbehaves.

mod fake;
mod secure;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use sgl_kv_indexer::arena::{Action, Batch, Index, PackedHashes, Tier};
use sgl_kv_indexer::client::{
    Answer, Client, Config, Embedded, ErrorClass, HASHES_PER_QUERY_MAX, PrefixIndex, Prompt, QueryError,
};
use sgl_kv_indexer::pb::{
    ExternalKvPrefixMatch, MatchExternalKvPrefixRequest, MatchExternalKvPrefixResponse,
};
use sgl_kv_indexer::server;
use tokio::net::TcpListener;

use fake::{Behaviour, Fake};

/// Long enough for any machine; a test that waits for it to end does so for its half.
const PATIENT: Duration = Duration::from_secs(60);

fn config(endpoints: &[&str]) -> Config {
    Config { deadline: PATIENT, ..Config::with_endpoints(endpoints.iter().copied()) }
}

fn client(endpoints: &[&str]) -> Client {
    Client::new(&config(endpoints)).expect("usable endpoints")
}

fn rows(answer: &Answer) -> Vec<(String, String, u32)> {
    answer.matches().map(|row| (row.worker_id.to_owned(), row.address.to_owned(), row.blocks)).collect()
}

/// An endpoint that nobody listens at.
fn nobody() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("http://{}", listener.local_addr().expect("bound"))
}

/// One match of this worker, of one block.
fn found(worker: &str) -> Behaviour {
    let matches = vec![ExternalKvPrefixMatch {
        worker_id: worker.into(),
        worker_address: format!("http://{worker}"),
        matched_prefix_blocks: 1,
    }];
    let answer = MatchExternalKvPrefixResponse { matches, best_prefix_blocks: 1, blocks_read: 1 };
    Behaviour::Answer(answer.encode_to_vec().into())
}

fn index() -> Arc<Index> {
    let index = Index::new();
    for (worker, address, blocks) in [("w0", "http://0", 3), ("w1", "http://1", 5), ("w2", "", 7)] {
        let packed = PackedHashes::pack(&(0..blocks).collect::<Vec<i64>>());
        let hashes = PackedHashes::new(&packed).expect("whole hashes");
        let actions = &[Action::Report { tier: Tier::Hbm, hashes, masks: &[], tokens: &[] }];
        let batch = Batch { worker_id: worker, worker_address: address, cache_spec: None, seq: 1, actions };
        index.apply(&batch).expect("a batch");
    }
    Arc::new(index)
}

async fn serve(index: Arc<Index>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(server::serve(listener, server::Config::default(), index, std::future::pending()));
    endpoint
}

#[tokio::test]
async fn a_server_and_an_index_of_this_process_answer_alike() {
    let index = index();
    let endpoint = serve(Arc::clone(&index)).await;
    let sources: [Box<dyn PrefixIndex>; 2] = [Box::new(client(&[&endpoint])), Box::new(Embedded::new(index))];
    let mut answers = Vec::new();
    for source in &sources {
        for hashes in [&[0, 1, 2, 3, 9][..], &[0], &[9, 0], &[]] {
            let answer = source.match_prefix(&Prompt::new(hashes)).await.expect("an answer");
            let rates: Vec<_> = answer.matches().map(|row| answer.match_rate(row.blocks)).collect();
            answers.push((rows(&answer), rates, answer.blocks_read()));
        }
    }
    let (remote, embedded) = answers.split_at(4);
    assert_eq!(remote, embedded);
    let row = |worker: usize, blocks| (format!("w{worker}"), format!("http://{worker}"), blocks);
    assert_eq!(remote[0].0, [row(1, 4), row(0, 3)]);
    assert_eq!(remote[0].1, [0.8, 0.6]);
    assert_eq!(remote[2], (Vec::new(), Vec::new(), 1));
    assert_eq!(remote[3], (Vec::new(), Vec::new(), 0));
}

#[tokio::test]
async fn a_prompt_past_a_message_is_cut_and_answered() {
    let index = index();
    let hashes: Vec<i64> = (0..2 * HASHES_PER_QUERY_MAX as i64).collect();
    let prompt = Prompt::new(&hashes);
    let endpoint = serve(Arc::clone(&index)).await;
    let remote = client(&[&endpoint]).match_prefix(&prompt).await.expect("an answer");
    let embedded = Embedded::new(index).match_prefix(&prompt).await.expect("an answer");
    for answer in [remote, embedded] {
        let best = answer.best().expect("a match");
        assert_eq!((best.worker_id, best.blocks), ("w1", 5));
        assert_eq!(answer.match_rate(best.blocks), 5.0 / hashes.len() as f64);
    }
}

#[test]
fn nothing_is_connected_before_the_first_query() {
    // Outside of a runtime, with nobody there: only what cannot work is refused.
    let client = client(&[&nobody(), "unix:/nowhere/indexer.sock"]);
    assert!(Client::new(&config(&["indexer:50051"])).is_err());
    assert!(Client::new(&config(&[])).is_err());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let error = runtime.block_on(client.match_prefix(&Prompt::new(&[1]))).unwrap_err();
    assert_eq!(error.class, ErrorClass::Unreachable, "{error}");
    assert!(client.endpoints().iter().all(|endpoint| endpoint.failures == 1));
}

#[tokio::test]
async fn a_server_that_starts_later_is_found() {
    let endpoint = nobody();
    let client = client(&[&endpoint]);
    let prompt = Prompt::new(&[7]);
    let error = client.match_prefix(&prompt).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Unreachable, "{error}");
    assert_eq!(error.endpoint.as_deref(), Some(&endpoint[..]));
    let listener = TcpListener::bind(endpoint.trim_start_matches("http://")).await.expect("still free");
    let _fake = Fake::serve(listener, found("late"));
    assert_eq!(client.match_prefix(&prompt).await.expect("an answer").matches().count(), 1);
    assert_eq!(client.endpoints()[0].failures, 0);
}

#[tokio::test]
async fn a_query_is_sent_as_it_was_encoded_with_its_deadline() {
    let mut fake = Fake::start(found("w")).await;
    let prompt = Prompt::new(&[5, -6]);
    client(&[&fake.endpoint]).match_prefix(&prompt).await.expect("an answer");
    let query = fake.queries.recv().await.expect("a query");
    let sent = MatchExternalKvPrefixRequest::decode(query.message).expect("protobuf");
    assert_eq!((sent.hashes, sent.max_blocks), (vec![5, -6], 0));
    assert!((1..=PATIENT.as_nanos()).contains(&query.timeout), "{}", query.timeout);

    // A router's default is 100 ms.
    let defaults = Config::with_endpoints([&fake.endpoint]);
    assert_eq!((defaults.deadline, defaults.in_flight_max), (Duration::from_millis(100), 32));
}

#[tokio::test]
async fn a_server_at_a_path_is_asked() {
    let folder = std::env::temp_dir().join(format!("kv-indexer-client-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("fake.sock");
    let fake = Fake::serve_unix(&path, found("unix"));
    let answer = client(&[&fake.endpoint]).match_prefix(&Prompt::new(&[1])).await;
    std::fs::remove_dir_all(&folder).expect("removed");
    assert_eq!(rows(&answer.expect("an answer"))[0].0, "unix");
}

/// The error of a query to one endpoint that behaves like this.
async fn failure(behaviour: Behaviour) -> QueryError {
    let fake = Fake::start(behaviour).await;
    client(&[&fake.endpoint]).match_prefix(&Prompt::new(&[1])).await.unwrap_err()
}

#[tokio::test]
async fn every_failure_has_its_class() {
    for (behaviour, class) in [
        (Behaviour::Status(14), ErrorClass::Unreachable),
        (Behaviour::Status(4), ErrorClass::Timeout),
        (Behaviour::Status(1), ErrorClass::Timeout),
        (Behaviour::Status(8), ErrorClass::Overloaded),
        (Behaviour::Status(11), ErrorClass::TooLarge),
        // Codes of a contract that is not ours.
        (Behaviour::Status(2), ErrorClass::Rejected),
        (Behaviour::Status(3), ErrorClass::Rejected),
        (Behaviour::Status(12), ErrorClass::Rejected),
        (Behaviour::Status(13), ErrorClass::Rejected),
        (Behaviour::Status(99), ErrorClass::Rejected),
        (Behaviour::Http(503), ErrorClass::Unreachable),
        (Behaviour::Http(404), ErrorClass::Rejected),
        (Behaviour::NoStatus, ErrorClass::Rejected),
        // Messages that are no answer.
        (Behaviour::Answer(Bytes::from_static(b"\xff\xff\xff")), ErrorClass::Rejected),
        (Behaviour::Answer(Bytes::from_static(b"\x0a\x06\x0a\x02ab\x10\x02")), ErrorClass::Rejected),
        // Connections that break, before and within an answer.
        (Behaviour::Half, ErrorClass::Unreachable),
        (Behaviour::Reset, ErrorClass::Unreachable),
        (Behaviour::Babble, ErrorClass::Unreachable),
        (Behaviour::HangUp, ErrorClass::Unreachable),
    ] {
        let error = failure(behaviour.clone()).await;
        assert_eq!(error.class, class, "{behaviour:?}: {error}");
        assert!(!error.reason.is_empty(), "{behaviour:?}");
    }
}

#[tokio::test]
async fn an_answer_past_its_bound_is_not_read() {
    let Behaviour::Answer(message) = found("worker") else { panic!("an answer") };
    let bytes = message.len();
    let fake = Fake::start(Behaviour::Answer(message)).await;
    for (answer_bytes_max, class) in [(bytes, None), (bytes - 1, Some(ErrorClass::TooLarge))] {
        let config = Config { answer_bytes_max, ..config(&[&fake.endpoint]) };
        let answer = Client::new(&config).expect("usable").match_prefix(&Prompt::new(&[1])).await;
        assert_eq!(answer.as_ref().err().map(|error| error.class), class, "{answer:?}");
    }
}

#[tokio::test]
async fn a_server_that_keeps_a_query_times_out() {
    let fake = Fake::start(Behaviour::Never).await;
    let config = Config { deadline: Duration::from_millis(50), ..config(&[&fake.endpoint]) };
    let error = Client::new(&config).expect("usable").match_prefix(&Prompt::new(&[1])).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Timeout, "{error}");
}

#[tokio::test]
async fn above_the_bound_a_query_is_refused_at_once_and_asks_nobody() {
    let mut fake = Fake::start(Behaviour::Never).await;
    let config = Config { in_flight_max: 2, ..config(&[&fake.endpoint]) };
    let client = Arc::new(Client::new(&config).expect("usable"));
    let ask = || {
        let client = Arc::clone(&client);
        tokio::spawn(async move { client.match_prefix(&Prompt::new(&[1])).await })
    };
    let running = [ask(), ask()];
    for _ in &running {
        fake.queries.recv().await.expect("a query");
    }
    let error = client.match_prefix(&Prompt::new(&[1])).await.unwrap_err();
    assert_eq!((error.class, error.endpoint), (ErrorClass::Overloaded, None));
    assert_eq!(fake.waiting(), 0);
    // A prompt without hashes asks nobody, so there is always room for it.
    assert!(client.match_prefix(&Prompt::default()).await.expect("nothing").is_empty());

    // A query that its router gave up leaves its place to the next.
    let [first, _second] = running;
    first.abort();
    assert!(first.await.expect_err("given up").is_cancelled());
    let _third = ask();
    fake.queries.recv().await.expect("a query");
}

#[tokio::test]
async fn what_another_server_may_do_better_is_passed_on() {
    for (behaviour, failures) in [
        (Behaviour::HangUp, 1),
        (Behaviour::Half, 1),
        (Behaviour::Status(14), 1),
        (Behaviour::Status(4), 1),
        // An overloaded server is a healthy one.
        (Behaviour::Status(8), 0),
    ] {
        let first = Fake::start(behaviour.clone()).await;
        let second = Fake::start(found("second")).await;
        let client = client(&[&first.endpoint, &second.endpoint]);
        let answer = client.match_prefix(&Prompt::new(&[1])).await.expect("an answer");
        assert_eq!(rows(&answer)[0].0, "second", "{behaviour:?}");
        let health: Vec<_> = client.endpoints().iter().map(|endpoint| endpoint.failures).collect();
        assert_eq!(health, [failures, 0], "{behaviour:?}");
    }
}

#[tokio::test]
async fn a_disagreement_is_not_passed_on() {
    for behaviour in [Behaviour::Status(3), Behaviour::Status(11), Behaviour::NoStatus] {
        let first = Fake::start(behaviour.clone()).await;
        let second = Fake::start(found("second")).await;
        let client = client(&[&first.endpoint, &second.endpoint]);
        let error = client.match_prefix(&Prompt::new(&[1])).await.unwrap_err();
        assert_eq!(error.endpoint.as_deref(), Some(&first.endpoint[..]), "{behaviour:?}");
        assert_eq!(second.waiting(), 0, "{behaviour:?}");
    }
}

#[tokio::test]
async fn a_server_that_hangs_costs_half_of_the_time_and_is_asked_last_from_then_on() {
    let mut first = Fake::start(Behaviour::Never).await;
    let mut second = Fake::start(found("second")).await;
    let config = Config { deadline: Duration::from_secs(4), ..config(&[&first.endpoint, &second.endpoint]) };
    let client = Client::new(&config).expect("usable");
    let prompt = Prompt::new(&[1]);
    assert_eq!(rows(&client.match_prefix(&prompt).await.expect("an answer"))[0].0, "second");
    let (kept, answered) = (first.queries.recv().await, second.queries.recv().await);
    assert!(kept.expect("a query").timeout <= Duration::from_secs(2).as_nanos());
    assert!(answered.expect("a query").timeout <= Duration::from_secs(2).as_nanos());
    assert_eq!(client.endpoints()[0].failures, 1);
}
