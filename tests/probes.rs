//! What probes and tools ask over gRPC: health and reflection.

use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::server::{Config, serve};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

const INDEX: &str = "kv_indexer.v1.KVIndexer";
const ADMIN: &str = "kv_indexer.admin.v1.Admin";

struct Running {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<std::io::Result<()>>,
}

impl Running {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let config = Config { settle: Duration::ZERO, ..Config::default() };
        let serving = serve(listener, config, Arc::new(Index::new()), shutdown);
        Running { address, stop, ended: tokio::spawn(serving) }
    }

    async fn channel(&self) -> Channel {
        let endpoint = Channel::from_shared(format!("http://{}", self.address)).expect("a URL");
        endpoint.connect().await.expect("a server")
    }
}

fn about(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

#[tokio::test]
async fn the_server_and_its_service_are_healthy_and_strangers_unknown() {
    let server = Running::start().await;
    let mut client = HealthClient::new(server.channel().await);
    for service in ["", INDEX] {
        let answer = client.check(about(service)).await.expect("an answer").into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
    }
    let unknown = client.check(about("kv_indexer.v1.NoSuch")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown}");
}

#[tokio::test]
async fn a_watch_is_told_of_the_drain_and_does_not_hold_it_up() {
    let server = Running::start().await;
    let mut client = HealthClient::new(server.channel().await);
    let mut watches = Vec::new();
    for service in ["", INDEX] {
        let mut watch = client.watch(about(service)).await.expect("a watch").into_inner();
        let first = watch.message().await.expect("a status").expect("a status");
        assert_eq!(first.status(), ServingStatus::Serving);
        watches.push(watch);
    }
    // From here the clock moves on only when there is nothing else to do, as in a drain that waits.
    tokio::time::pause();
    let asked_to_stop = tokio::time::Instant::now();
    server.stop.send(()).expect("a running server");
    for mut watch in watches {
        let last = watch.message().await.expect("a status").expect("a status");
        assert_eq!(last.status(), ServingStatus::NotServing);
        assert!(watch.message().await.expect("an end").is_none(), "the watch goes on");
    }
    drop(client);
    server.ended.into_future().await.expect("no panic").expect("a drain");
    assert!(asked_to_stop.elapsed().as_secs() < 10, "the drain waited for the watches");
}

/// One question to reflection and its answer.
async fn reflected(channel: Channel, question: MessageRequest) -> MessageResponse {
    let mut client = ServerReflectionClient::new(channel);
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let requests = tonic::codegen::tokio_stream::iter([request]);
    let mut answers = client.server_reflection_info(requests).await.expect("answers").into_inner();
    let answer: ServerReflectionResponse = answers.message().await.expect("an answer").expect("an answer");
    answer.message_response.expect("what was asked for")
}

#[tokio::test]
async fn reflection_lists_what_is_served_and_describes_it() {
    let server = Running::start().await;
    let channel = server.channel().await;
    let services = match reflected(channel.clone(), MessageRequest::ListServices(String::new())).await {
        MessageResponse::ListServicesResponse(list) => list.service,
        other => panic!("{other:?}"),
    };
    let names: Vec<_> = services.iter().map(|service| service.name.as_str()).collect();
    for name in [INDEX, ADMIN, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    let question = MessageRequest::FileContainingSymbol(format!("{INDEX}.MatchExternalKvPrefix"));
    let files = match reflected(channel, question).await {
        MessageResponse::FileDescriptorResponse(files) => files.file_descriptor_proto,
        other => panic!("{other:?}"),
    };
    let file = prost_types::FileDescriptorProto::decode(files[0].as_slice()).expect("a descriptor");
    let methods = file.service[0].method.iter().map(|method| method.name()).collect::<Vec<_>>();
    assert!(methods.contains(&"MatchExternalKvPrefix") && methods.contains(&"ApplyExternalKvBatch"));
}

#[tokio::test]
async fn old_tools_find_reflection_under_its_old_name() {
    use tonic_reflection::pb::v1alpha::ServerReflectionRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_response::MessageResponse;

    let server = Running::start().await;
    let question = MessageRequest::ListServices(String::new());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let requests = tonic::codegen::tokio_stream::iter([request]);
    let mut client = ServerReflectionClient::new(server.channel().await);
    let mut answers = client.server_reflection_info(requests).await.expect("answers").into_inner();
    let answer = answers.message().await.expect("an answer").expect("an answer");
    match answer.message_response {
        Some(MessageResponse::ListServicesResponse(list)) => {
            assert!(list.service.iter().any(|service| service.name == INDEX), "{list:?}");
        }
        other => panic!("{other:?}"),
    }
}
