//! `/tls/1.0.0` as Hypha means it: mutual TLS 1.3 against a trust bundle, without libp2p's certificate extension.
//!
//! Certificates are verified by rustls' own verifiers, a server's for the IP name 0.0.0.0; the peer id follows from the
//! Ed25519 key of the certificate that was shown.

use std::{error::Error, io, net::Ipv4Addr, path::Path, sync::Arc};

use futures::{future::BoxFuture, AsyncRead, AsyncWrite, FutureExt};
use futures_rustls::{
    rustls::{
        self,
        client::WebPkiServerVerifier,
        pki_types::{pem::PemObject, CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName},
        server::WebPkiClientVerifier,
        ClientConfig, CommonState, RootCertStore, ServerConfig,
    },
    TlsAcceptor, TlsConnector, TlsStream,
};
use libp2p::{
    core::{
        upgrade::{InboundConnectionUpgrade, OutboundConnectionUpgrade},
        UpgradeInfo,
    },
    identity::{ed25519, Keypair, PublicKey},
    PeerId,
};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The security upgrade of a transport.
#[derive(Clone)]
pub struct MutualTls {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

/// Reads `<prefix>-cert.pem`, `-key.pem`, `-trust.pem` and, where there is one, `-crls.pem`.
pub fn load(prefix: &str) -> Result<(Keypair, MutualTls), Box<dyn Error>> {
    let file = |end: &str| format!("{prefix}-{end}.pem");
    let chain = CertificateDer::pem_file_iter(file("cert"))?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(file("key"))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file("trust"))? {
        roots.add(certificate?)?;
    }
    let mut crls = Vec::new();
    if Path::new(&file("crls")).exists() {
        crls = CertificateRevocationListDer::pem_file_iter(file("crls"))?.collect::<Result<Vec<_>, _>>()?;
    }
    // PKCS#8 of an Ed25519 key: the seed is behind two headers of an octet string each
    let pkcs8 = key.secret_der();
    let seed = pkcs8.windows(4).position(|at| at == [0x04, 0x22, 0x04, 0x20]).ok_or("no Ed25519 key")? + 4;
    let mut seed = pkcs8[seed..seed + 32].to_vec();
    let keypair: Keypair = ed25519::Keypair::from(ed25519::SecretKey::try_from_bytes(&mut seed)?).into();

    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = &[&rustls::version::TLS13];
    let roots = Arc::new(roots);
    let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).with_crls(crls.clone());
    let servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).with_crls(crls);
    let server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)?
        .with_client_cert_verifier(clients.build()?)
        .with_single_cert(chain.clone(), key.clone_key())?;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)?
        .with_webpki_verifier(servers.build()?)
        .with_client_auth_cert(chain, key)?;
    Ok((keypair, MutualTls { server: Arc::new(server), client: Arc::new(client) }))
}

impl UpgradeInfo for MutualTls {
    type Info = &'static str;
    type InfoIter = std::iter::Once<Self::Info>;

    fn protocol_info(&self) -> Self::InfoIter {
        std::iter::once("/tls/1.0.0")
    }
}

impl<C> InboundConnectionUpgrade<C> for MutualTls
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Output = (PeerId, TlsStream<C>);
    type Error = io::Error;
    type Future = BoxFuture<'static, Result<Self::Output, Self::Error>>;

    fn upgrade_inbound(self, socket: C, _: Self::Info) -> Self::Future {
        async move {
            let stream = TlsAcceptor::from(self.server).accept(socket).await?;
            let peer = peer_of(stream.get_ref().1)?;
            Ok((peer, stream.into()))
        }
        .boxed()
    }
}

impl<C> OutboundConnectionUpgrade<C> for MutualTls
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Output = (PeerId, TlsStream<C>);
    type Error = io::Error;
    type Future = BoxFuture<'static, Result<Self::Output, Self::Error>>;

    fn upgrade_outbound(self, socket: C, _: Self::Info) -> Self::Future {
        async move {
            let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
            let stream = TlsConnector::from(self.client).connect(name, socket).await?;
            let peer = peer_of(stream.get_ref().1)?;
            Ok((peer, stream.into()))
        }
        .boxed()
    }
}

fn peer_of(state: &CommonState) -> io::Result<PeerId> {
    let shown = state.peer_certificates().and_then(|chain| chain.first()).ok_or_else(|| io::Error::other("no certificate"))?;
    let (_, certificate) = X509Certificate::from_der(shown).map_err(io::Error::other)?;
    let key = ed25519::PublicKey::try_from_bytes(&certificate.public_key().subject_public_key.data).map_err(io::Error::other)?;
    Ok(PublicKey::from(key).to_peer_id())
}
