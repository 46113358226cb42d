//! The few messages that are asked and answered here, as serde makes them, and so as a Rust node's codec does.

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub struct HealthRequest {}

#[derive(Debug, Serialize, Deserialize)]
pub struct HealthResponse {
    pub healthy: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Time {
    pub secs_since_epoch: u64,
    pub nanos_since_epoch: u32,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum ApiRequest {
    RenewLease {
        #[serde(with = "serde_bytes")]
        id: Vec<u8>,
    },
    Data {
        dataset: String,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum ApiResponse {
    RenewLease(Renewal),
    Data(Slice),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Renewal {
    Renewed {
        #[serde(with = "serde_bytes")]
        id: Vec<u8>,
        timeout: Time,
    },
    Failed,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Slice {
    Success {
        #[serde(with = "serde_bytes")]
        data_provider: Vec<u8>,
        index: u64,
    },
    NotFound,
    Error(String),
}

/// What a puller sends behind its length.
#[derive(Debug, Serialize, Deserialize)]
pub struct PullHeader {
    pub dataset: String,
    pub index: u64,
}
