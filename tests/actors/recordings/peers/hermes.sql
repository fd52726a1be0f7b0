CREATE TABLE schema_version (
    version INTEGER NOT NULL
);
INSERT INTO schema_version VALUES(22);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    user_id TEXT,
    session_key TEXT,
    chat_id TEXT,
    chat_type TEXT,
    thread_id TEXT,
    display_name TEXT,
    origin_json TEXT,
    expiry_finalized INTEGER DEFAULT 0,
    model TEXT,
    model_config TEXT,
    system_prompt TEXT,
    parent_session_id TEXT,
    started_at REAL NOT NULL,
    ended_at REAL,
    end_reason TEXT,
    message_count INTEGER DEFAULT 0,
    tool_call_count INTEGER DEFAULT 0,
    input_tokens INTEGER DEFAULT 0,
    output_tokens INTEGER DEFAULT 0,
    cache_read_tokens INTEGER DEFAULT 0,
    cache_write_tokens INTEGER DEFAULT 0,
    reasoning_tokens INTEGER DEFAULT 0,
    cwd TEXT,
    git_branch TEXT,
    git_repo_root TEXT,
    billing_provider TEXT,
    billing_base_url TEXT,
    billing_mode TEXT,
    estimated_cost_usd REAL,
    actual_cost_usd REAL,
    cost_status TEXT,
    cost_source TEXT,
    pricing_version TEXT,
    title TEXT,
    api_call_count INTEGER DEFAULT 0,
    handoff_state TEXT,
    handoff_platform TEXT,
    handoff_error TEXT,
    compression_failure_cooldown_until REAL,
    compression_failure_error TEXT,
    compression_fallback_streak INTEGER NOT NULL DEFAULT 0,
    profile_name TEXT,
    rewind_count INTEGER NOT NULL DEFAULT 0,
    archived INTEGER NOT NULL DEFAULT 0,
    FOREIGN KEY (parent_session_id) REFERENCES sessions(id)
);
INSERT INTO sessions VALUES('20261122_101500_ab12cd','cli',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,'m-1',NULL,'You look up orders.',NULL,1.79536383016289711003e+09,NULL,NULL,9,2,0,0,0,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'Orders 7 and 8',0,NULL,NULL,NULL,NULL,NULL,0,NULL,1,0);
INSERT INTO sessions VALUES('telegram:42','telegram','42',NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,1.79536383021268534663e+09,NULL,NULL,4,0,0,0,0,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,0,NULL,0,0);
INSERT INTO sessions VALUES('empty','cli',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,1.7953638302372145653e+09,NULL,NULL,0,0,0,0,0,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,0,NULL,0,0);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL REFERENCES sessions(id),
    role TEXT NOT NULL,
    content TEXT,
    tool_call_id TEXT,
    tool_calls TEXT,
    tool_name TEXT,
    effect_disposition TEXT,
    timestamp REAL NOT NULL,
    token_count INTEGER,
    finish_reason TEXT,
    reasoning TEXT,
    reasoning_content TEXT,
    reasoning_details TEXT,
    codex_reasoning_items TEXT,
    codex_message_items TEXT,
    platform_message_id TEXT,
    observed INTEGER DEFAULT 0,
    active INTEGER NOT NULL DEFAULT 1,
    compacted INTEGER NOT NULL DEFAULT 0,
    api_content TEXT
);
INSERT INTO messages VALUES(1,'20261122_101500_ab12cd','user','Where are orders 7 and 8?',NULL,NULL,NULL,NULL,1.79536383016354155533e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(2,'20261122_101500_ab12cd','assistant','Let me see.',NULL,'[{"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{\"order\": 7}"}}, {"id": "call_2", "type": "function", "function": {"name": "look_up", "arguments": "{\"order\": 8}"}}]',NULL,NULL,1.79536383017197537421e+09,NULL,'tool_calls','Two calls.',NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(3,'20261122_101500_ab12cd','tool','order 7 is on its way','call_1',NULL,'look_up',NULL,1.79536383017285084721e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(4,'20261122_101500_ab12cd','tool','order 8 is on its way','call_2',NULL,'look_up',NULL,1.79536383017620611193e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(5,'20261122_101500_ab12cd','assistant','Both are on their way. Zoë, 日本.',NULL,NULL,NULL,NULL,1.79536383017857193952e+09,NULL,'stop',NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(6,'20261122_101500_ab12cd','user','' || char(0) || 'json:[{"type": "text", "text": "And this one?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]',NULL,NULL,NULL,NULL,1795363830.1802,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(7,'20261122_101500_ab12cd','assistant','I cannot read it.',NULL,NULL,NULL,NULL,1.79536383018639850617e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(8,'20261122_101500_ab12cd','user','Never mind the picture.',NULL,NULL,NULL,NULL,1.79536383018861842152e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0,0,NULL);
INSERT INTO messages VALUES(9,'20261122_101500_ab12cd','assistant','Taken back.',NULL,NULL,NULL,NULL,1.79536383019286799431e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0,0,NULL);
INSERT INTO messages VALUES(10,'telegram:42','user','Hello',NULL,NULL,NULL,NULL,1.79536383022311306001e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0,1,NULL);
INSERT INTO messages VALUES(11,'telegram:42','assistant','Hello to you.',NULL,NULL,NULL,NULL,1.79536383022702193254e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0,1,NULL);
INSERT INTO messages VALUES(12,'telegram:42','user','[summary] They greeted.',NULL,NULL,NULL,NULL,1.79536383022867846491e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(13,'telegram:42','assistant','Understood.',NULL,NULL,NULL,NULL,1.79536383022867941858e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(14,'telegram:42','user','Bye',NULL,NULL,NULL,NULL,1.79536383022973728175e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
INSERT INTO messages VALUES(15,'telegram:42','assistant','Bye.',NULL,NULL,NULL,NULL,1.79536383023325443264e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1,0,NULL);
