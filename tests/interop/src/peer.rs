//! The swarm: behaviours, what is told of their events, and the commands.

use std::{
    collections::HashMap,
    error::Error,
    future::Future,
    io,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use futures::StreamExt;
use libp2p::{
    dcutr, gossipsub, identify, identity::Keypair, kad, ping, relay, request_response,
    request_response::{cbor, OutboundRequestId, ProtocolSupport},
    swarm::{behaviour::toggle::Toggle, NetworkBehaviour, SwarmEvent},
    tcp, yamux, Multiaddr, PeerId, StreamProtocol, Swarm, SwarmBuilder,
};
use serde::Deserialize;
use serde_json::{json, Value};
use tokio::sync::mpsc;

use crate::{
    messages::{ApiRequest, ApiResponse, HealthRequest, HealthResponse, Renewal},
    security, streams, tell,
};

const KAD: StreamProtocol = StreamProtocol::new("/ipfs/kad/1.0.0");
const API: StreamProtocol = StreamProtocol::new("/hypha-api/0.0.1");
const HEALTH: StreamProtocol = StreamProtocol::new("/hypha-health/0.0.1");

#[derive(Deserialize)]
pub struct Settings {
    /// Prefix of `-cert.pem`, `-key.pem`, `-trust.pem`.
    identity: String,
    #[serde(default)]
    listen: Vec<Multiaddr>,
    /// Whether to be a relay, with the crate's own limits.
    #[serde(default)]
    relay: bool,
    #[serde(default)]
    dcutr: bool,
    #[serde(default)]
    kad_server: bool,
    /// Whether identify keeps addresses to itself, as behind a NAT they would be of no use.
    #[serde(default)]
    hide_listen: bool,
    /// Seconds after which a connection that nothing uses is closed; libp2p's own 10 if left out.
    idle: Option<f64>,
    /// Seconds between pings; libp2p's own 15 if left out.
    ping: Option<f64>,
}

#[derive(NetworkBehaviour)]
struct Behaviour {
    relay_client: relay::client::Behaviour,
    relay: Toggle<relay::Behaviour>,
    dcutr: Toggle<dcutr::Behaviour>,
    identify: identify::Behaviour,
    ping: ping::Behaviour,
    gossip: gossipsub::Behaviour,
    kad: kad::Behaviour<kad::store::MemoryStore>,
    api: cbor::Behaviour<ApiRequest, ApiResponse>,
    health: cbor::Behaviour<HealthRequest, HealthResponse>,
    streams: libp2p_stream::Behaviour,
}

fn behaviour(key: &Keypair, relay_client: relay::client::Behaviour, settings: &Settings) -> Behaviour {
    let id = key.public().to_peer_id();
    let about = identify::Config::new("/hypha-identify/0.0.1".into(), key.public()).with_agent_version("hypha-rust/0.0.1".into()).with_hide_listen_addrs(settings.hide_listen);
    let pings = settings.ping.map_or_else(ping::Config::new, |every| {
        ping::Config::new().with_interval(Duration::from_secs_f64(every))
    });
    let signed = gossipsub::MessageAuthenticity::Signed(key.clone());
    let mut table = kad::Behaviour::with_config(id, kad::store::MemoryStore::new(id), kad::Config::new(KAD));
    table.set_mode(settings.kad_server.then_some(kad::Mode::Server));
    Behaviour {
        relay_client,
        relay: settings.relay.then(|| relay::Behaviour::new(id, relay::Config::default())).into(),
        dcutr: settings.dcutr.then(|| dcutr::Behaviour::new(id)).into(),
        identify: identify::Behaviour::new(about),
        ping: ping::Behaviour::new(pings),
        gossip: gossipsub::Behaviour::new(signed, gossipsub::Config::default()).expect("the crate's own settings"),
        kad: table,
        api: cbor::Behaviour::new([(API, ProtocolSupport::Full)], request_response::Config::default()),
        health: cbor::Behaviour::new([(HEALTH, ProtocolSupport::Full)], request_response::Config::default()),
        streams: libp2p_stream::Behaviour::new(),
    }
}

struct Peer {
    swarm: Swarm<Behaviour>,
    control: libp2p_stream::Control,
    /// Numbers of the commands whose queries and requests are under way.
    queries: HashMap<kad::QueryId, u64>,
    asked: HashMap<OutboundRequestId, u64>,
    asked_health: HashMap<OutboundRequestId, u64>,
}

/// Run until the commands end.
pub async fn run(settings: Settings, mut commands: mpsc::Receiver<Value>) -> Result<(), Box<dyn Error>> {
    let (key, tls) = security::load(&settings.identity)?;
    let relayed_tls = tls.clone();
    let mut swarm = SwarmBuilder::with_existing_identity(key)
        .with_tokio()
        .with_tcp(
            tcp::Config::default(),
            move |_: &Keypair| Ok::<_, io::Error>(tls.clone()),
            yamux::Config::default,
        )?
        .with_relay_client(move |_: &Keypair| Ok::<_, io::Error>(relayed_tls.clone()), yamux::Config::default)?
        .with_behaviour(|key, relay_client| behaviour(key, relay_client, &settings))?
        .with_swarm_config(|config| match settings.idle {
            Some(seconds) => config.with_idle_connection_timeout(Duration::from_secs_f64(seconds)),
            None => config,
        })
        .build();
    for address in &settings.listen {
        swarm.listen_on(address.clone())?;
    }
    let mut control = swarm.behaviour().streams.new_control();
    streams::serve(&mut control);
    tell(json!({"kind": "started", "peer": swarm.local_peer_id().to_string()}));
    let mut peer = Peer { swarm, control, queries: HashMap::new(), asked: HashMap::new(), asked_health: HashMap::new() };
    loop {
        tokio::select! {
            event = peer.swarm.select_next_some() => peer.tell_of(event),
            command = commands.recv() => match command {
                Some(command) => {
                    let id = command["id"].as_u64().unwrap_or(0);
                    if let Err(error) = peer.obey(id, &command) {
                        answer(id, Err(error.to_string()));
                    }
                }
                None => return Ok(()),
            }
        }
    }
}

fn answer(id: u64, result: Result<Value, String>) {
    tell(match result {
        Ok(value) => json!({"kind": "answer", "id": id, "result": value}),
        Err(error) => json!({"kind": "answer", "id": id, "error": error}),
    });
}

fn texts<T: ToString>(items: impl IntoIterator<Item = T>) -> Vec<String> {
    items.into_iter().map(|item| item.to_string()).collect()
}

impl Peer {
    fn obey(&mut self, id: u64, command: &Value) -> Result<(), Box<dyn Error>> {
        let text = |key: &str| command[key].as_str().unwrap_or_default();
        let peer = || text("peer").parse::<PeerId>();
        let address = || text("address").parse::<Multiaddr>();
        let done = match text("do") {
            "dial" => {
                self.swarm.dial(address()?)?;
                json!(null)
            }
            "dial_peer" => {
                self.swarm.dial(peer()?)?;
                json!(null)
            }
            "listen" => json!(self.swarm.listen_on(address()?)?.to_string()),
            "external" => {
                self.swarm.add_external_address(address()?);
                json!(null)
            }
            "disconnect" => json!(self.swarm.disconnect_peer_id(peer()?).is_ok()),
            "connected" => json!(texts(self.swarm.connected_peers())),
            "addresses" => json!({"listen": texts(self.swarm.listeners()), "external": texts(self.swarm.external_addresses())}),
            "add_address" => json!(format!("{:?}", self.swarm.behaviour_mut().kad.add_address(&peer()?, address()?))),
            "subscribe" => json!(self.swarm.behaviour_mut().gossip.subscribe(&gossipsub::IdentTopic::new(text("topic")))?),
            "unsubscribe" => json!(self.swarm.behaviour_mut().gossip.unsubscribe(&gossipsub::IdentTopic::new(text("topic")))),
            "publish" => {
                let topic = gossipsub::IdentTopic::new(text("topic"));
                json!(self.swarm.behaviour_mut().gossip.publish(topic, text("data"))?.to_string())
            }
            "mesh" => {
                let topic = gossipsub::IdentTopic::new(text("topic")).hash();
                json!(texts(self.swarm.behaviour().gossip.mesh_peers(&topic)))
            }
            _ => return self.begin(id, command),
        };
        answer(id, Ok(done));
        Ok(())
    }

    /// Commands whose answer comes later.
    fn begin(&mut self, id: u64, command: &Value) -> Result<(), Box<dyn Error>> {
        let text = |key: &str| command[key].as_str().unwrap_or_default();
        let number = |key: &str| command[key].as_u64().unwrap_or_default();
        let peer = text("peer").parse::<PeerId>();
        let control = self.control.clone();
        let behaviour = self.swarm.behaviour_mut();
        match text("do") {
            "bootstrap" => {
                self.queries.insert(behaviour.kad.bootstrap()?, id);
            }
            "closest" => {
                self.queries.insert(behaviour.kad.get_closest_peers(peer?), id);
            }
            "get" => {
                self.queries.insert(behaviour.kad.get_record(kad::RecordKey::new(&text("key"))), id);
            }
            "put" => {
                let mut record = kad::Record::new(text("key").as_bytes().to_vec(), text("value").as_bytes().to_vec());
                record.expires = command["ttl"].as_f64().map(|ttl| Instant::now() + Duration::from_secs_f64(ttl));
                self.queries.insert(behaviour.kad.put_record(record, kad::Quorum::N(NonZeroUsize::MIN))?, id);
            }
            "health" => {
                self.asked_health.insert(behaviour.health.send_request(&peer?, HealthRequest {}), id);
            }
            "renew" => {
                let request = ApiRequest::RenewLease { id: text("lease").as_bytes().to_vec() };
                self.asked.insert(behaviour.api.send_request(&peer?, request), id);
            }
            "send" => later(id, streams::send(control, peer?, number("size"))),
            "receive" => later(id, streams::receive(control, peer?, number("size"))),
            "many" => later(id, streams::many(control, peer?, number("count"), number("size"))),
            "hold" => later(id, streams::hold(control, peer?, command["seconds"].as_f64().unwrap_or(1.0))),
            "be_reset" => later(id, streams::be_reset(control, peer?)),
            other => return Err(format!("no such command: {other}").into()),
        }
        Ok(())
    }

    fn tell_of(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(event) => self.tell_of_behaviour(event),
            SwarmEvent::NewListenAddr { address, .. } => tell(json!({"kind": "listening", "address": address.to_string()})),
            SwarmEvent::ListenerClosed { addresses, reason, .. } => {
                tell(json!({"kind": "listener_closed", "addresses": texts(addresses), "reason": format!("{reason:?}")}));
            }
            SwarmEvent::ConnectionEstablished { peer_id, endpoint, concurrent_dial_errors, .. } => tell(json!({
                "kind": "connected", "peer": peer_id.to_string(), "address": endpoint.get_remote_address().to_string(),
                "dialled": endpoint.is_dialer(), "relayed": endpoint.is_relayed(),
                "failed": concurrent_dial_errors.unwrap_or_default().iter()
                    .map(|(address, error)| format!("{address}: {error:?}")).collect::<Vec<_>>(),
            })),
            SwarmEvent::ConnectionClosed { peer_id, cause, num_established, endpoint, .. } => tell(json!({
                "kind": "closed", "peer": peer_id.to_string(), "left": num_established, "relayed": endpoint.is_relayed(),
                "cause": cause.map(|cause| cause.to_string()),
            })),
            SwarmEvent::OutgoingConnectionError { peer_id, error, .. } => tell(json!({
                "kind": "dial_failed", "peer": peer_id.map(|peer| peer.to_string()), "error": error.to_string(),
            })),
            SwarmEvent::IncomingConnectionError { error, .. } => {
                tell(json!({"kind": "refused", "error": error.to_string(), "detail": format!("{error:?}")}));
            }
            _ => (),
        }
    }

    fn tell_of_behaviour(&mut self, event: BehaviourEvent) {
        match event {
            BehaviourEvent::Identify(identify::Event::Received { peer_id, info, .. }) => self.identified(peer_id, info),
            BehaviourEvent::Identify(identify::Event::Error { peer_id, error, .. }) => {
                tell(json!({"kind": "identify_failed", "peer": peer_id.to_string(), "error": error.to_string()}));
            }
            BehaviourEvent::Ping(event) => tell(json!({
                "kind": "ping", "peer": event.peer.to_string(), "error": event.result.err().map(|error| error.to_string()),
            })),
            BehaviourEvent::Gossip(gossipsub::Event::Message { propagation_source, message, .. }) => tell(json!({
                "kind": "heard", "from": propagation_source.to_string(), "topic": message.topic.to_string(),
                "source": message.source.map(|source| source.to_string()), "data": String::from_utf8_lossy(&message.data),
            })),
            BehaviourEvent::Gossip(gossipsub::Event::Subscribed { peer_id, topic }) => {
                tell(json!({"kind": "subscribed", "peer": peer_id.to_string(), "topic": topic.to_string()}));
            }
            BehaviourEvent::Gossip(event) => tell(json!({"kind": "gossip", "what": format!("{event:?}")})),
            BehaviourEvent::Kad(kad::Event::OutboundQueryProgressed { id, result, step, .. }) => self.found(id, result, step.last),
            BehaviourEvent::Kad(kad::Event::RoutingUpdated { peer, addresses, .. }) => {
                tell(json!({"kind": "routed", "peer": peer.to_string(), "addresses": texts(addresses.iter())}));
            }
            BehaviourEvent::RelayClient(event) => tell(relay_client_event(event)),
            BehaviourEvent::Relay(event) => tell(json!({"kind": "relay", "what": format!("{event:?}")})),
            BehaviourEvent::Dcutr(event) => tell(json!({
                "kind": "dcutr", "peer": event.remote_peer_id.to_string(), "error": event.result.err().map(|error| error.to_string()),
            })),
            BehaviourEvent::Api(event) => self.api(event),
            BehaviourEvent::Health(event) => self.health(event),
            _ => (),
        }
    }

    fn identified(&mut self, peer: PeerId, info: identify::Info) {
        tell(json!({
            "kind": "identified", "peer": peer.to_string(), "agent": info.agent_version, "version": info.protocol_version,
            "addresses": texts(&info.listen_addrs), "protocols": texts(&info.protocols), "observed": info.observed_addr.to_string(),
        }));
        // what a Rust node does with it: its routing table is what it dials from
        if info.protocols.contains(&KAD) {
            for address in info.listen_addrs {
                self.swarm.behaviour_mut().kad.add_address(&peer, address);
            }
        }
    }

    fn found(&mut self, query: kad::QueryId, result: kad::QueryResult, last: bool) {
        let Some(&id) = self.queries.get(&query) else { return };
        match result {
            kad::QueryResult::Bootstrap(result) => match result {
                Ok(ok) if ok.num_remaining > 0 => return,
                result => answer(id, result.map(|ok| json!(ok.peer.to_string())).map_err(|error| error.to_string())),
            },
            kad::QueryResult::GetClosestPeers(result) => answer(
                id,
                result
                    .map(|ok| ok.peers.iter().map(|peer| json!([peer.peer_id.to_string(), texts(&peer.addrs)])).collect())
                    .map_err(|error| error.to_string()),
            ),
            kad::QueryResult::GetRecord(result) => match result {
                Ok(kad::GetRecordOk::FoundRecord(found)) => answer(
                    id,
                    Ok(json!({
                        "value": String::from_utf8_lossy(&found.record.value),
                        "publisher": found.record.publisher.map(|peer| peer.to_string()),
                        "ttl": found.record.expires.map(|at| at.saturating_duration_since(Instant::now()).as_secs_f64()),
                        "from": found.peer.map(|peer| peer.to_string()),
                    })),
                ),
                Ok(_) => answer(id, Ok(json!("no more"))),
                Err(error) => answer(id, Err(error.to_string())),
            },
            kad::QueryResult::PutRecord(result) => {
                answer(id, result.map(|_| json!("stored")).map_err(|error| error.to_string()));
            }
            _ => return,
        }
        if last {
            self.queries.remove(&query);
        }
    }

    fn api(&mut self, event: request_response::Event<ApiRequest, ApiResponse>) {
        use request_response::{Event, Message};
        match event {
            Event::Message { message: Message::Request { request, channel, .. }, .. } => {
                let response = match request {
                    ApiRequest::RenewLease { .. } => ApiResponse::RenewLease(Renewal::Failed),
                };
                let _ = self.swarm.behaviour_mut().api.send_response(channel, response);
            }
            Event::Message { message: Message::Response { request_id, response }, .. } => {
                answer(self.asked.remove(&request_id).unwrap_or(0), Ok(json!(format!("{response:?}"))));
            }
            Event::OutboundFailure { request_id, error, .. } => {
                answer(self.asked.remove(&request_id).unwrap_or(0), Err(error.to_string()));
            }
            Event::InboundFailure { error, .. } => tell(json!({"kind": "inbound_failure", "error": error.to_string()})),
            Event::ResponseSent { .. } => (),
        }
    }

    fn health(&mut self, event: request_response::Event<HealthRequest, HealthResponse>) {
        use request_response::{Event, Message};
        match event {
            Event::Message { message: Message::Request { channel, .. }, .. } => {
                let _ = self.swarm.behaviour_mut().health.send_response(channel, HealthResponse { healthy: true });
            }
            Event::Message { message: Message::Response { request_id, response }, .. } => {
                answer(self.asked_health.remove(&request_id).unwrap_or(0), Ok(json!(response.healthy)));
            }
            Event::OutboundFailure { request_id, error, .. } => {
                answer(self.asked_health.remove(&request_id).unwrap_or(0), Err(error.to_string()));
            }
            Event::InboundFailure { error, .. } => tell(json!({"kind": "inbound_failure", "error": error.to_string()})),
            Event::ResponseSent { .. } => (),
        }
    }
}

fn relay_client_event(event: relay::client::Event) -> Value {
    use relay::client::Event::{InboundCircuitEstablished, OutboundCircuitEstablished, ReservationReqAccepted};
    match event {
        ReservationReqAccepted { relay_peer_id, renewal, limit } => {
            json!({"kind": "reserved", "relay": relay_peer_id.to_string(), "renewal": renewal, "limit": limit.map(|limit| format!("{limit:?}"))})
        }
        OutboundCircuitEstablished { relay_peer_id, limit } => {
            json!({"kind": "circuit_out", "relay": relay_peer_id.to_string(), "limit": limit.map(|limit| format!("{limit:?}"))})
        }
        InboundCircuitEstablished { src_peer_id, limit } => {
            json!({"kind": "circuit_in", "peer": src_peer_id.to_string(), "limit": limit.map(|limit| format!("{limit:?}"))})
        }
    }
}

/// Run a stream's conversation beside everything else and answer with its result.
fn later(id: u64, work: impl Future<Output = io::Result<Value>> + Send + 'static) {
    tokio::spawn(async move {
        answer(id, work.await.map_err(|error| format!("{:?}: {error}", error.kind())));
    });
}
