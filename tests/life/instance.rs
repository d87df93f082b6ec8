//! Every answer of every service says which server gave it.

use sgl_kv_indexer::server::Config;
use tokio::net::TcpStream;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;

use crate::server::{Running, batch};

fn instance(metadata: &MetadataMap) -> Option<&str> {
    metadata.get("kv-indexer-instance").map(|value| value.to_str().expect("text"))
}

#[tokio::test]
async fn answers_errors_and_streams_of_every_service_have_it() {
    let server = Running::start(Config::default()).await;
    let expected = Some(server.instance.as_str());
    let mut client = server.client().await;
    let applied = client.apply_external_kv_batch(batch("w0", 1, &[1])).await.expect("applied");
    assert_eq!(instance(applied.metadata()), expected);

    let invalid = client.apply_external_kv_batch(batch("", 1, &[1])).await.unwrap_err();
    assert_eq!((invalid.code(), instance(invalid.metadata())), (Code::InvalidArgument, expected));
    let channel = server.channel().await;
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready().await.expect("a connection");
    let codec = tonic_prost::ProstCodec::<(), ()>::default();
    let path = "/kv_indexer.v1.NoSuch/Call".parse().expect("a path");
    let nobody = grpc.unary(Request::new(()), path, codec).await.unwrap_err();
    assert_eq!((nobody.code(), instance(nobody.metadata())), (Code::Unimplemented, expected));

    let mut health = HealthClient::new(channel.clone());
    let well = health.check(HealthCheckRequest::default()).await.expect("an answer");
    assert_eq!(instance(well.metadata()), expected);
    let watched = health.watch(HealthCheckRequest::default()).await.expect("a watch");
    assert_eq!(instance(watched.metadata()), expected);
    let unknown = HealthCheckRequest { service: "no.Such".to_owned() };
    let unknown = health.check(unknown).await.unwrap_err();
    assert_eq!((unknown.code(), instance(unknown.metadata())), (Code::NotFound, expected));

    let requests = tonic::codegen::tokio_stream::iter([ServerReflectionRequest::default()]);
    let reflected = ServerReflectionClient::new(channel).server_reflection_info(requests).await;
    assert_eq!(instance(reflected.expect("a stream").metadata()), expected);
}

#[tokio::test]
async fn a_call_cut_by_its_deadline_has_it() {
    let server = Running::start(Config::default()).await;
    let stream = TcpStream::connect(server.rpc).await.expect("a server");
    let (mut sender, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    for timeout in ["0S", "50m"] {
        let request = http::Request::post("http://x/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix");
        let request = request.header("content-type", "application/grpc").header("grpc-timeout", timeout);
        // A query whose body never comes is answered by the server's own clock.
        let (answer, _body) = sender.send_request(request.body(()).expect("a request"), false).expect("open");
        let head = answer.await.expect("an answer");
        let header = |name: &str| head.headers().get(name).map(|value| value.to_str().expect("text"));
        let deadline_exceeded = Some("4");
        assert_eq!(header("grpc-status"), deadline_exceeded, "{timeout}");
        assert_eq!(header("kv-indexer-instance"), Some(server.instance.as_str()), "{timeout}");
    }
}

#[tokio::test]
async fn it_is_shown_and_each_server_has_its_own() {
    let servers = [Running::start(Config::default()).await, Running::start(Config::default()).await];
    for server in &servers {
        let id = &server.instance;
        assert_eq!(server.state().await["instance"], id.as_str());
        let series = format!("kv_indexer_instance_info{{id=\"{id}\"}}");
        assert_eq!(server.series(&series).await, Some(1.0));
    }
    assert_ne!(servers[0].instance, servers[1].instance);
    for server in servers {
        server.stop().await;
    }
}
