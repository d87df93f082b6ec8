//! What a call over gRPC allocates, counted end to end: the server's promise is that a prefix query makes no
//! allocation per block of its prompt and none per candidate, and that an apply reads its hashes in place.
//!
//! The server runs in this process, on a thread of its own with one warm connection. The client is a blocking
//! socket that writes frames made beforehand and reads into room made beforehand, so it allocates nothing and
//! whatever the counting allocator sees is the server's. Counts are of many calls, divided, and the least of
//! several rounds, so that what a timer or the test's harness does beside them makes no difference.
//!
//! A message comes in frames of 16 KiB, for which the connection makes room, and tonic joins them in one buffer;
//! an answer is written and then copied behind its head by tonic. So bytes may grow by [`MESSAGE_COPIES`] times
//! the message and [`ANSWER_COPIES`] times the answer, and allocations by one for each [`PIECE_BYTES`] of either.
//! A further copy of the hashes would be one time too many, and an allocation for each candidate many more.

mod common;

use std::alloc::System;
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use common::{PAUSE, TRIES};
use prost::Message;
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::pb::{
    ApplyExternalKvBatchRequest, ExternalKvAction, MatchExternalKvPrefixRequest,
    MatchExternalKvPrefixResponse,
};
use sgl_kv_indexer::server::{Config, serve};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio::sync::oneshot;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by the test that counts, as the allocator's counts are the process's.
static ALONE: Mutex<()> = Mutex::new(());

/// Calls of a round; what is put off to every so many calls is divided by it.
const CALLS: usize = 64;
/// Rounds, of which the least counts.
const ROUNDS: usize = 5;

/// What a short call may allocate: its headers both ways, its task, its timer, and room to read and write.
const CALL_COUNT_MAX: usize = 48;
const CALL_BYTES_MAX: usize = 16 * 1024;

/// Bytes of a message or an answer for which one allocation more is allowed.
const PIECE_BYTES: usize = 4 * 1024;
/// Further allocations of a longer call: lists that grow, and a thread for long work.
const FEW: usize = 4;

/// Times that a message is held: as it was read, and joined.
const MESSAGE_COPIES: usize = 2;
/// The same for an answer: room made for it by a guess, twice what it needs here, and tonic's copy.
const ANSWER_COPIES: usize = 3;

/// Largest payload of a frame that a peer takes without being asked.
const FRAME_BYTES: usize = 16 * 1024;
/// Bytes of a frame's head, of which the last four are its stream.
const HEAD_BYTES: usize = 9;
const STREAM_AT: usize = 5;
/// Types of frames.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The flag of a call's last frame, and of an acknowledgement.
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
/// The largest window there is: answers are never held up.
const WINDOW: u32 = i32::MAX as u32;
const WINDOW_AT_FIRST: u32 = 65_535;

const PREFIX: &str = "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix";
const APPLY: &str = "/kv_indexer.v1.KVIndexer/ApplyExternalKvBatch";

/// Holders of the prompts: one, a word of them, four words of them.
const HOLDERS: [usize; 3] = [1, 64, 256];
/// Blocks of the prompts.
const BLOCKS: [usize; 3] = [64, 2_000, 16_000];
/// Hashes of the applies; the last is the most that one may have.
const HASHES: [usize; 3] = [32, 2_000, 16_384];

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame's length").to_be_bytes();
    [&length[1..], &[kind, flags], &[0; 4], payload].concat()
}

/// A header that leaves nothing in the peer's table; names and values are short and not compressed.
fn header(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).expect("a short text")], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// The frames of one call, ready but for the number of its stream.
struct Call {
    bytes: Vec<u8>,
    /// Where frames begin.
    frames: Vec<usize>,
    /// Length of the message.
    message: usize,
}

impl Call {
    fn new(path: &str, message: &impl Message) -> Self {
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).expect("a message's length").to_be_bytes();
        let headers = [
            header(":method", "POST"),
            header(":scheme", "http"),
            header(":path", path),
            header("content-type", "application/grpc"),
            header("te", "trailers"),
            // As routers send one, but with time enough for any machine.
            header("grpc-timeout", "1H"),
        ];
        let mut frames = vec![frame(HEADERS, END_HEADERS, &headers.concat())];
        let body = [&[0][..], &length, &message].concat();
        frames.extend(body.chunks(FRAME_BYTES).map(|piece| frame(DATA, 0, piece)));
        frames.last_mut().expect("data")[4] = END_STREAM;
        let begins = frames.iter().scan(0, |end, frame| {
            *end += frame.len();
            Some(*end - frame.len())
        });
        Call { frames: begins.collect(), bytes: frames.concat(), message: message.len() }
    }
}

/// One connection, as much of HTTP/2 as a call after the other needs.
struct Client {
    socket: BufReader<TcpStream>,
    stream: u32,
    /// The last answer's body.
    body: Vec<u8>,
    payload: Vec<u8>,
}

impl Client {
    fn connect(address: SocketAddr) -> Self {
        let mut socket = TcpStream::connect(address).expect("a connection");
        socket.set_nodelay(true).expect("an option");
        // A server that says or takes nothing fails the test instead of holding it up.
        socket.set_read_timeout(Some(TRIES * PAUSE)).expect("an option");
        socket.set_write_timeout(Some(TRIES * PAUSE)).expect("an option");
        let window = [&[0, 4], &WINDOW.to_be_bytes()[..]].concat();
        let opening = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            frame(SETTINGS, 0, &window),
            frame(WINDOW_UPDATE, 0, &(WINDOW - WINDOW_AT_FIRST).to_be_bytes()),
        ];
        socket.write_all(&opening.concat()).expect("written");
        let body = Vec::with_capacity(1 << 20);
        Client { socket: BufReader::new(socket), stream: 1, body, payload: vec![0; FRAME_BYTES] }
    }

    /// Sends a call and reads its answer to the end; allocates nothing.
    fn call(&mut self, call: &mut Call) -> &[u8] {
        for &begin in &call.frames {
            let stream = &mut call.bytes[begin + STREAM_AT..begin + HEAD_BYTES];
            stream.copy_from_slice(&self.stream.to_be_bytes());
        }
        self.socket.get_mut().write_all(&call.bytes).expect("written");
        self.body.clear();
        let begun = Instant::now();
        loop {
            // A server may ask whether we are there for as long as it does not answer.
            assert!(begun.elapsed() < TRIES * PAUSE, "no answer");
            let mut head = [0; HEAD_BYTES];
            self.socket.read_exact(&mut head).expect("a frame");
            let [high, middle, low, kind, flags, stream @ ..] = head;
            let length = u32::from_be_bytes([0, high, middle, low]) as usize;
            let payload = &mut self.payload[..length];
            self.socket.read_exact(payload).expect("a payload");
            match kind {
                SETTINGS | PING if flags & ACK == 0 => {
                    let answered = if kind == PING { length } else { 0 };
                    let head = [0, 0, answered as u8, kind, ACK, 0, 0, 0, 0];
                    self.socket.get_mut().write_all(&head).expect("written");
                    self.socket.get_mut().write_all(&payload[..answered]).expect("written");
                }
                RST_STREAM | GOAWAY => panic!("the server ends the call: {payload:02x?}"),
                DATA => self.body.extend_from_slice(payload),
                _ => {}
            }
            let is_of_call = u32::from_be_bytes(stream) == self.stream && matches!(kind, DATA | HEADERS);
            if is_of_call && flags & END_STREAM != 0 {
                self.stream += 2;
                // An answer that is an error has no message, not even an empty one.
                assert!(self.body.len() >= 5, "an error instead of an answer");
                return &self.body[5..];
            }
        }
    }
}

/// What one call allocates.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Allocations, and reallocations.
    count: usize,
    bytes: usize,
    /// Length of the message and of the answer.
    message: usize,
    answer: usize,
}

impl Cost {
    /// Checks a call that is short in every way.
    fn check_alone(self, name: &str) {
        println!("{name}: {self:?}");
        assert!(self.count <= CALL_COUNT_MAX && self.bytes <= CALL_BYTES_MAX, "{name}: {self:?}");
    }

    /// Checks a longer call against the short one; `lists` are bytes that it may keep beside its message.
    fn check_beside(self, short: Cost, lists: usize, name: &str) {
        println!("{name}: {self:?}");
        let count_max = short.count + (self.message + self.answer) / PIECE_BYTES + FEW;
        assert!(self.count <= count_max, "{name}: {self:?}, at most {count_max} allocations");
        let copies = MESSAGE_COPIES * self.message + ANSWER_COPIES * self.answer;
        // The connection makes room for a whole frame, and again where it reads one in parts.
        let spare = FRAME_BYTES + self.message / 8;
        let bytes_max = short.bytes + copies + spare + lists;
        assert!(self.bytes <= bytes_max, "{name}: {self:?}, at most {bytes_max} bytes");
    }
}

/// A server with one connection to it, for the test that holds it.
struct Served {
    client: Client,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
    _alone: MutexGuard<'static, ()>,
}

impl Served {
    fn start() -> Self {
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("an option");
        let address = listener.local_addr().expect("an address");
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
                let stopped = async { drop(stopped.await) };
                serve(listener, Config::default(), Arc::new(Index::new()), stopped).await.expect("served");
            });
        });
        let mut client = Client::connect(address);
        // Its answer comes behind the server's settings and windows, without which nothing large may be sent.
        client.call(&mut report(0, vec![0]));
        Served { client, stop, serving, _alone: alone }
    }

    fn stop(self) {
        drop((self.client, self.stop));
        self.serving.join().expect("served to the end");
    }

    /// What a call costs once it is warm.
    fn cost(&mut self, call: &mut Call) -> Cost {
        let answer = self.client.call(call).len();
        let mut round = || {
            let region = Region::new(ALLOCATOR);
            for _ in 0..CALLS {
                assert_eq!(self.client.call(call).len(), answer);
            }
            let change = region.change();
            (change.allocations + change.reallocations, change.bytes_allocated)
        };
        let rounds: Vec<_> = (0..ROUNDS).map(|_| round()).collect();
        let least =
            |of: fn(&(usize, usize)) -> usize| rounds.iter().map(of).min().unwrap_or_default() / CALLS;
        Cost { count: least(|round| round.0), bytes: least(|round| round.1), message: call.message, answer }
    }
}

/// Hashes through a mix, so that they look like an engine's; chains of other seeds have none in common.
fn chain(seed: u64, blocks: usize) -> Vec<i64> {
    let hash = |place: u64| {
        let value = (seed << 32 | place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((value ^ (value >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)).cast_signed()
    };
    (1..=blocks as u64).map(hash).collect()
}

fn report(worker: usize, hashes: Vec<i64>) -> Call {
    let block_sizes = vec![16; hashes.len()];
    let action = ExternalKvAction { r#type: 1, tier: 1, hashes, block_sizes, ..Default::default() };
    let batch = ApplyExternalKvBatchRequest {
        worker_id: format!("worker-{worker:03}"),
        worker_address: format!("http://10.0.0.{worker:03}:30000"),
        actions: vec![action],
        ..Default::default()
    };
    Call::new(APPLY, &batch)
}

fn query(hashes: Vec<i64>) -> Call {
    Call::new(PREFIX, &MatchExternalKvPrefixRequest { hashes, max_blocks: 0 })
}

#[test]
fn a_prefix_query_allocates_neither_by_block_nor_by_candidate() {
    let mut served = Served::start();
    let longest = BLOCKS[BLOCKS.len() - 1];
    for (seed, &holders) in HOLDERS.iter().enumerate() {
        for worker in 0..holders {
            served.client.call(&mut report(worker, chain(seed as u64, longest)));
        }
    }
    let mut short: Option<Cost> = None;
    for (seed, &holders) in HOLDERS.iter().enumerate() {
        for &blocks in &BLOCKS {
            let mut query = query(chain(seed as u64, blocks));
            let answer = served.client.call(&mut query);
            let answer = MatchExternalKvPrefixResponse::decode(answer).expect("an answer");
            assert_eq!(answer.matches.len(), holders);
            assert!(answer.matches.iter().all(|found| found.matched_prefix_blocks as usize == blocks));
            let (cost, name) = (served.cost(&mut query), format!("{blocks} blocks, {holders} holders"));
            match short {
                Some(short) => cost.check_beside(short, 0, &name),
                None => cost.check_alone(&name),
            }
            short.get_or_insert(cost);
        }
    }
    served.stop();
}

#[test]
fn an_apply_reads_its_hashes_in_place() {
    let mut served = Served::start();
    let mut short: Option<Cost> = None;
    for &hashes in &HASHES {
        let mut report = report(0, chain(0, hashes));
        served.client.call(&mut report);
        let (cost, name) = (served.cost(&mut report), format!("{hashes} hashes"));
        // Block sizes are a byte each on the wire, and numbers in the list of them.
        let sizes = hashes * size_of::<u32>();
        match short {
            Some(short) => cost.check_beside(short, sizes, &name),
            None => cost.check_alone(&name),
        }
        short.get_or_insert(cost);
    }
    served.stop();
}
