/**
 * Types of the API's responses, as far as the views use them. Nothing imports this module at run time.
 * @module
 */

/**
 * @typedef {object} Usage
 * @property {number} input_tokens
 * @property {number} output_tokens
 * @property {number} total_tokens
 * @property {number} cache_read_tokens
 * @property {number} cache_write_tokens
 * @property {number} reasoning_tokens
 * @property {number} [estimated_tokens]
 */

/**
 * @typedef {object} Budget
 * @property {number | null} tokens
 * @property {string | null} usd
 * @property {number | null} calls
 * @property {{tokens: number, usd: string, calls: number}} used
 * @property {number} held
 * @property {number | null} remaining
 * @property {number} used_fraction
 * @property {number | null} resets_in_s
 * @property {number | null} kept_for_closing
 * @property {boolean} is_closed
 */

/**
 * When a budget is empty at the rate of its newest calls.
 * @typedef {object} BurnRate
 * @property {number} empty_in_s
 * @property {number} empty_in_calls
 * @property {boolean} refills_first
 */

/**
 * @typedef {{tokens: number | null, usd: string | null, calls: number | null}} Limits
 */

/**
 * The numbers of a budget error.
 * @typedef {object} Arithmetic
 * @property {"session" | "agent" | "key" | "rate" | "group" | "all"} account
 * @property {string} id id of the session, or name of the client key
 * @property {"tokens" | "usd" | "calls"} unit
 * @property {number | string} limit
 * @property {number | string} used
 * @property {number | string} held
 * @property {number | string} needed
 * @property {string | null} resets_at
 */

/**
 * @typedef {object} Session
 * @property {string} id
 * @property {string | null} created_at null if no call was charged
 * @property {string | null} last_call_at
 * @property {number} calls
 * @property {Usage} cumulative_token_usage
 * @property {string} usage_source
 * @property {string | null} cost_usd
 * @property {{input_tokens: number, calls: number}} saved_by_trimming
 * @property {{tokens: number, calls: number}} used_with_children
 * @property {Budget | null} budget
 * @property {string} response_mode
 * @property {boolean} derived_id
 * @property {BurnRate | null} [burn_rate] null if it is unknown
 * @property {Limits | null} [declared_budget] declared by its last call
 * @property {string | null} [parent]
 * @property {{id: string, budget: Budget | null}[]} [parents] the nearest first
 * @property {string[]} [recent_tools]
 * @property {Record<string, {calls: number, result_tokens: number, results: number}>} [tools]
 * @property {string | null} [active_step]
 * @property {Record<string, Step>} [steps] by agent of the configuration
 * @property {string | null} [last_stop] limit of runaway protection for which calls were refused last
 * @property {Agent[]} [agents] the main agent first; empty without subagents
 */

/**
 * The main agent or a subagent of a session.
 * @typedef {object} Agent
 * @property {string} id
 * @property {string | null} type
 * @property {string | null} parent
 * @property {string | null} active_step
 * @property {string | null} last_call_at
 * @property {number} calls
 * @property {Usage} cumulative_token_usage
 * @property {string | null} cost_usd
 * @property {Record<string, number>} tools
 * @property {{cumulative_token_usage: Usage} | null} with_children
 * @property {Budget | null} budget
 */

/**
 * The step state of an agent.
 * @typedef {object} Step
 * @property {string | null} active_step
 * @property {string | null} description
 * @property {number | null} sequence_index
 * @property {string[][]} sequence
 * @property {string[] | null} due
 * @property {boolean} is_set
 */

/**
 * @typedef {object} Item
 * @property {number} index
 * @property {string} role
 * @property {number} tokens
 * @property {number} sent_tokens
 * @property {string} rule
 */

/**
 * @typedef {object} Context
 * @property {number} tokens
 * @property {number} original_tokens
 * @property {number} kept_tokens
 * @property {string} source
 * @property {number | null} budget
 * @property {number} conversation_tokens
 * @property {number} tool_tokens
 * @property {Record<string, number>} trimmed
 * @property {{received: number, sent: number, reason: string | null} | null} thinking
 * @property {boolean} shadow
 * @property {Item[]} [items]
 */

/**
 * @typedef {object} Call
 * @property {string} request_id
 * @property {string} call_id
 * @property {string | null} session
 * @property {string} started_at
 * @property {string} dialect
 * @property {string} operation
 * @property {string} provider
 * @property {string} model
 * @property {string | null} response_model
 * @property {boolean} stream
 * @property {number} status
 * @property {string} outcome
 * @property {string | null} error_code
 * @property {{message: string, budget: Arithmetic | null} | null} error the error that the client received from the gateway
 * @property {string | null} finish_reason
 * @property {string[]} tools
 * @property {Usage | null} usage
 * @property {string | null} usage_source
 * @property {string | null} cost_usd
 * @property {number} overhead_ms
 * @property {number | null} first_byte_ms
 * @property {number} duration_ms
 * @property {number} request_bytes
 * @property {number} response_bytes
 * @property {Record<string, string>} notes
 * @property {Context | null} context
 * @property {string | null} [response_mode]
 * @property {string | null} [active_step]
 * @property {string | null} [agent] null: the client names none
 * @property {string | null} [agent_type]
 * @property {string | null} [parent_agent]
 * @property {string | null} [request_class]
 */

/**
 * @typedef {object} Provider
 * @property {string} name
 * @property {string} adapter
 * @property {"ok" | "failing" | "left_alone" | "not_called" | "no_key"} state
 * @property {number} failures
 * @property {number | null} asked_in_s
 */

/**
 * Refusals without a record in the store, with the same error and credential.
 * @typedef {object} UnrecordedRefusal
 * @property {string} code
 * @property {number} status
 * @property {string | null} credential first digits of its SHA-256
 * @property {string} message
 * @property {number} count
 * @property {string} first_at
 * @property {string} last_at
 */

/**
 * @typedef {object} Health
 * @property {string} status
 * @property {string} version
 * @property {{pid: number, workers: number, started_at: string, calls: number, holds: number}} worker
 * @property {{url: string, reachable: boolean, problem: string | null, away: boolean, waiting: number,
 *   on_failure: string}} store
 * @property {string | null} default_provider
 * @property {Provider[]} providers
 * @property {UnrecordedRefusal[]} unrecorded_refusals
 * @property {{issuer: string, problem: string | null} | null} identity_provider
 */

/**
 * @typedef {object} Model
 * @property {string} model
 * @property {string} provider
 * @property {string} name
 * @property {number | null} window
 * @property {number | null} input
 * @property {number | null} output
 * @property {string | null} tokenizer
 * @property {{input: string | null, output: string | null, cache_read: string | null, cache_write: string | null} | null}
 *   price per million tokens
 * @property {boolean | null} reasoning
 * @property {Record<string, string>} sources
 */

/**
 * An entry of the audit log.
 * @typedef {object} Change
 * @property {string} at
 * @property {string} action
 * @property {string} target
 * @property {string} actor
 * @property {string} origin
 * @property {unknown} old
 * @property {unknown} new
 */

/**
 * A client key, without its secret.
 * @typedef {object} Key
 * @property {string} name
 * @property {string | null} group
 * @property {boolean} in_configuration
 * @property {string[]} models
 * @property {Budget | null} budget
 * @property {string | null} window
 * @property {number | null} rpm
 * @property {string | null} created_at
 * @property {string | null} expires_at
 * @property {string[]} replaced_until
 * @property {string | null} last_used_at
 * @property {number} sessions
 * @property {string | null} problem
 */

/**
 * A view. `update` is called if the address changed, but not the view.
 * @typedef {object} View
 * @property {string} title
 * @property {HTMLElement} element
 * @property {(params: URLSearchParams) => void} [update]
 * @property {() => void} [close]
 */

export {};
